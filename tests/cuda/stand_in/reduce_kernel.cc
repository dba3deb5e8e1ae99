// The reduction kernel's part: its threads' work is compiled for the host, and they run one after
// the other when the stream comes to the launch.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <new>
#include <type_traits>

#include "ebb/runtime/kernels/reduce_launch.h"
#include "ebb/runtime/kernels/reduce_work.h"
#include "order.h"
#include "state.h"

namespace ebb {
namespace {

using stand_in::NoteKernel;
using stand_in::Reads;
using stand_in::Touched;
using stand_in::Writes;

constexpr int64_t kThreads = 5;

// Without new, because tests check that operations allocate nothing. CUDA's own memory does not
// count there.
template <class Arrays>
cudaError_t Enqueue(cudaStream_t stream, void (*run)(void*), const Arrays& arrays) {
  static_assert(std::is_trivially_copyable_v<Arrays>);
  void* const parameters = std::malloc(sizeof(Arrays));
  if (parameters == nullptr) return cudaErrorMemoryAllocation;
  stand_in::EnqueueKernel(stream, run, new (parameters) Arrays(arrays), &std::free);
  return cudaSuccess;
}

void RunReduce(void* argument) {
  const auto* const arrays = static_cast<const ReduceArrays*>(argument);
  reduce_work::WithTypes(*arrays, [&](auto number, auto combine) {
    using T = decltype(number);
    const int64_t head = reduce_work::HeadOf(*arrays, sizeof(T));
    for (int64_t thread = 0; thread < kThreads; ++thread)
      reduce_work::ReduceAsThread<T, decltype(combine)::value>(*arrays, head, thread, kThreads);
  });
}

void RunScale(void* argument) {
  const auto* const arrays = static_cast<const ScaleArrays*>(argument);
  reduce_work::WithType(arrays->dtype, [&](auto number) {
    for (int i = 0; i < arrays->spans_count; ++i) {
      for (int64_t thread = 0; thread < kThreads; ++thread)
        reduce_work::ScaleAsThread<decltype(number)>(arrays->spans[i], arrays->factor, thread,
                                                     kThreads);
    }
  });
}

}  // namespace

cudaError_t LoadReductions(ReduceGrids* grids) {
  for (auto& of_type : grids->blocks)
    std::fill(std::begin(of_type), std::end(of_type), stand_in::ResidentBlocks());
  std::fill(std::begin(grids->scale), std::end(grids->scale), stand_in::ResidentBlocks());
  return static_cast<cudaError_t>(stand_in::Injected("LoadReductions"));
}

cudaError_t LaunchReduce(const ReduceGrids& grids, cudaStream_t stream,
                         const ReduceArrays& arrays) {
  if (stand_in::Lost() != cudaSuccess) return stand_in::Lost();
  if (grids.Of(arrays) != stand_in::ResidentBlocks()) return cudaErrorInvalidConfiguration;
  if (const int code = stand_in::Injected("cudaLaunchKernel"))
    return static_cast<cudaError_t>(code);
  std::array<Touched, ReduceArrays::kInputsMax + 1> touched;
  const int64_t bytes = arrays.count * SizeOf(arrays.dtype);
  const bool row = arrays.stride != 0;
  for (int i = 0; i < (row ? 1 : arrays.inputs_count); ++i) {
    touched[static_cast<size_t>(i)] =
        Reads(arrays.inputs[i], row ? (arrays.inputs_count - 1) * arrays.stride + bytes : bytes);
  }
  touched.back() = Writes(arrays.destination, bytes);
  // Noted as NCCL's operations are: the communicators' own tests use arrays of the host.
  if (stand_in::WatchesOrder()) NoteKernel(stream, "LaunchReduce", touched);
  return Enqueue(stream, &RunReduce, arrays);
}

cudaError_t LaunchScale(const ReduceGrids& grids, cudaStream_t stream, const ScaleArrays& arrays) {
  if (stand_in::Lost() != cudaSuccess) return stand_in::Lost();
  if (grids.scale[static_cast<int>(arrays.dtype)] != stand_in::ResidentBlocks())
    return cudaErrorInvalidConfiguration;
  if (const int code = stand_in::Injected("cudaLaunchKernel"))
    return static_cast<cudaError_t>(code);
  std::array<Touched, ScaleArrays::kSpansMax> touched;
  for (int i = 0; i < arrays.spans_count; ++i)
    touched[static_cast<size_t>(i)] =
        Writes(arrays.spans[i].data, arrays.spans[i].count * SizeOf(arrays.dtype));
  if (stand_in::WatchesOrder()) NoteKernel(stream, "LaunchScale", touched);
  return Enqueue(stream, &RunScale, arrays);
}

}  // namespace ebb
