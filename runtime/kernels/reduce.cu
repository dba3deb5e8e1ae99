// The reduction kernels: each thread gets its numbers from reduce_work.h. Bound by memory: each
// input is read once and the destination written. Spans that are scaled in place are read and
// written once.
#include <cuda_runtime.h>

#include <algorithm>

#include "ebb/runtime/device/cuda/resident_blocks.h"
#include "ebb/runtime/kernels/reduce_launch.h"
#include "ebb/runtime/kernels/reduce_work.h"

namespace ebb {
namespace {

constexpr int kThreads = 256;

template <class T, ReduceArrays::Combine kCombine>
__global__ void __launch_bounds__(kThreads)
    Reduce(const __grid_constant__ ReduceArrays arrays, const int64_t head) {
  reduce_work::ReduceAsThread<T, kCombine>(
      arrays, head, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
}

// A row of blocks for each span.
template <class T>
__global__ void __launch_bounds__(kThreads) Scale(const __grid_constant__ ScaleArrays arrays) {
  reduce_work::ScaleAsThread<T>(arrays.spans[blockIdx.y], arrays.factor,
                                int64_t{blockIdx.x} * kThreads + threadIdx.x,
                                int64_t{gridDim.x} * kThreads);
}

unsigned BlocksOf(int64_t pieces, int blocks_max) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((pieces + kThreads - 1) / kThreads, 1, std::max(blocks_max, 1)));
}

}  // namespace

cudaError_t LoadReductions(ReduceGrids* grids) {
  cudaError_t loaded = cudaSuccess;
  ReduceArrays arrays;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
    for (const auto combine :
         {ReduceArrays::Combine::kSum, ReduceArrays::Combine::kMax, ReduceArrays::Combine::kMin}) {
      arrays.dtype = dtype;
      arrays.combine = combine;
      reduce_work::WithTypes(arrays, [&](auto number, auto combined) {
        if (loaded != cudaSuccess) return;
        loaded = LoadAndCountResident(
            reinterpret_cast<const void*>(&Reduce<decltype(number), decltype(combined)::value>),
            kThreads, &grids->blocks[static_cast<int>(dtype)][static_cast<int>(combine)]);
      });
    }
    reduce_work::WithType(dtype, [&](auto number) {
      if (loaded != cudaSuccess) return;
      loaded = LoadAndCountResident(reinterpret_cast<const void*>(&Scale<decltype(number)>),
                                    kThreads, &grids->scale[static_cast<int>(dtype)]);
    });
  }
  return loaded;
}

cudaError_t LaunchReduce(const ReduceGrids& grids, cudaStream_t stream,
                         const ReduceArrays& arrays) {
  if (arrays.count == 0) return cudaSuccess;
  cudaError_t launched = cudaSuccess;
  reduce_work::WithTypes(arrays, [&](auto number, auto combine) {
    using T = decltype(number);
    int64_t head = reduce_work::HeadOf(arrays, sizeof(T));
    const int64_t pieces = std::max((arrays.count - head) / reduce_work::kPack<T>, head);
    ReduceArrays passed = arrays;
    void* parameters[] = {&passed, &head};
    // Unlike <<<>>> and cudaGetLastError, it neither reports nor clears errors of earlier calls.
    launched = cudaLaunchKernel(&Reduce<T, decltype(combine)::value>,
                                dim3(BlocksOf(pieces, grids.Of(arrays))), dim3(kThreads),
                                parameters, 0, stream);
  });
  if (launched != cudaSuccess) cudaGetLastError();  // handled by the caller
  return launched;
}

cudaError_t LaunchScale(const ReduceGrids& grids, cudaStream_t stream, const ScaleArrays& arrays) {
  int64_t longest = 0;
  for (int i = 0; i < arrays.spans_count; ++i) longest = std::max(longest, arrays.spans[i].count);
  if (longest == 0) return cudaSuccess;
  cudaError_t launched = cudaSuccess;
  reduce_work::WithType(arrays.dtype, [&](auto number) {
    using T = decltype(number);
    const unsigned blocks =
        BlocksOf(longest / reduce_work::kPack<T>,
                 grids.scale[static_cast<int>(arrays.dtype)] / arrays.spans_count);
    ScaleArrays passed = arrays;
    void* parameters[] = {&passed};
    launched = cudaLaunchKernel(&Scale<T>, dim3(blocks, static_cast<unsigned>(arrays.spans_count)),
                                dim3(kThreads), parameters, 0, stream);
  });
  if (launched != cudaSuccess) cudaGetLastError();  // handled by the caller
  return launched;
}

}  // namespace ebb
