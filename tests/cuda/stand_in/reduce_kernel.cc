// The reduction kernel's half: what its threads do is compiled for the host, and they run one after
// the other when the stream comes to it.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <new>
#include <type_traits>

#include "ebb/runtime/comm/cuda/launch.h"
#include "ebb/runtime/comm/cuda/reduce_work.h"
#include "order.h"
#include "state.h"

namespace ebb {
namespace {

using stand_in::NoteKernel;
using stand_in::Reads;
using stand_in::Touched;
using stand_in::Writes;

constexpr int64_t kThreads = 5;

void RunReduce(void* argument) {
  const auto* const arrays = static_cast<const ReduceArrays*>(argument);
  reduce_work::WithTypes(*arrays, [&](auto number, auto combine) {
    using T = decltype(number);
    const int64_t head = reduce_work::HeadOf(*arrays, sizeof(T));
    for (int64_t thread = 0; thread < kThreads; ++thread)
      reduce_work::ReduceAsThread<T, decltype(combine)::value>(*arrays, head, thread, kThreads);
  });
}

}  // namespace

cudaError_t LoadReductions(ReduceGrids* grids) {
  for (auto& of_type : grids->blocks)
    std::fill(std::begin(of_type), std::end(of_type), stand_in::ResidentBlocks());
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
  // As NCCL's operations: the communicators' own tests bring arrays of the host.
  if (stand_in::WatchesOrder()) NoteKernel(stream, "LaunchReduce", touched);
  // Not with new: operations are tested to allocate nothing, which CUDA's own memory is no part of.
  static_assert(std::is_trivially_copyable_v<ReduceArrays>);
  void* const parameters = std::malloc(sizeof(ReduceArrays));
  if (parameters == nullptr) return cudaErrorMemoryAllocation;
  stand_in::EnqueueKernel(stream, &RunReduce, new (parameters) ReduceArrays(arrays), &std::free);
  return cudaSuccess;
}

}  // namespace ebb
