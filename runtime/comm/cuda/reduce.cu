// The reduction kernel: threads given their numbers (reduce_work.h). Bound by memory: each input is
// read once and the destination written.
#include <cuda_runtime.h>

#include <algorithm>

#include "ebb/runtime/comm/cuda/launch.h"
#include "ebb/runtime/comm/cuda/reduce_work.h"

namespace ebb {
namespace {

constexpr int kThreads = 256;
// As many as a device keeps running at once, or it would wait for blocks to begin and end; the
// threads walk on from there. 2,048 threads on each processor of the largest device.
constexpr int64_t kBlocksMax = 148 * 8;

template <class T, ReduceArrays::Combine kCombine>
__global__ void __launch_bounds__(kThreads)
    Reduce(const __grid_constant__ ReduceArrays arrays, const int64_t head) {
  reduce_work::ReduceAsThread<T, kCombine>(
      arrays, head, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
}

}  // namespace

cudaError_t LaunchReduce(cudaStream_t stream, const ReduceArrays& arrays) {
  if (arrays.count == 0) return cudaSuccess;
  cudaError_t launched = cudaSuccess;
  reduce_work::WithTypes(arrays, [&](auto number, auto combine) {
    using T = decltype(number);
    int64_t head = reduce_work::HeadOf(arrays, sizeof(T));
    const int64_t pieces = std::max((arrays.count - head) / reduce_work::kPack<T>, head);
    const int64_t blocks = std::clamp<int64_t>((pieces + kThreads - 1) / kThreads, 1, kBlocksMax);
    ReduceArrays passed = arrays;
    void* parameters[] = {&passed, &head};
    // Unlike <<<>>> and cudaGetLastError it says nothing of earlier calls, and forgets none.
    launched =
        cudaLaunchKernel(&Reduce<T, decltype(combine)::value>, dim3(static_cast<unsigned>(blocks)),
                         dim3(kThreads), parameters, 0, stream);
  });
  if (launched != cudaSuccess) cudaGetLastError();  // it is dealt with by the caller
  return launched;
}

}  // namespace ebb
