// The kernels' half: all that optim/cuda/launch.h declares, so that nothing else of it is linked.
#include <algorithm>
#include <cstddef>

#include "ebb/optim/cast.h"
#include "ebb/optim/cuda/launch.h"
#include "ebb/optim/norm.h"
#include "ebb/runtime/device/thread_team.h"
#include "state.h"

namespace ebb::optim {
namespace {

using stand_in::EnqueueKernel;

// Never destroyed: streams may outlive what is static here.
ThreadTeam& Team() {
  static auto* const team = new ThreadTeam(1);
  return *team;
}

// `kernel` holds copies of the arguments, as a launch does.
template <class Kernel>
cudaError_t Launch(const char* function, cudaStream_t stream, Kernel kernel) {
  if (stand_in::Lost() != cudaSuccess) return stand_in::Lost();
  if (const int code = stand_in::Injected(function)) return static_cast<cudaError_t>(code);
  EnqueueKernel(stream, Task(kernel));
  return cudaSuccess;
}

void CastTwice(const CastArrays& arrays) {
  constexpr int64_t kBlock = 1024;
  alignas(64) std::byte rounded[kBlock * sizeof(float)];
  const auto* const from = static_cast<const std::byte*>(arrays.source);
  auto* const to = static_cast<std::byte*>(arrays.destination);
  for (int64_t at = 0; at < arrays.count; at += kBlock) {
    const int64_t count = std::min(kBlock, arrays.count - at);
    Cast(Team(), from + at * SizeOf(arrays.source_dtype), arrays.source_dtype, rounded, arrays.via,
         count, Rounding::kNearest);
    Cast(Team(), rounded, arrays.via, to + at * SizeOf(arrays.destination_dtype),
         arrays.destination_dtype, count, arrays.rounding);
  }
}

}  // namespace

cudaError_t LoadKernels() {
  return static_cast<cudaError_t>(stand_in::Injected("LoadKernels"));
}

cudaError_t LaunchCast(cudaStream_t stream, const CastArrays& arrays) {
  return Launch("LaunchCast", stream, [arrays] {
    if (arrays.via == DType::kFloat32) {
      Cast(Team(), arrays.source, arrays.source_dtype, arrays.destination, arrays.destination_dtype,
           arrays.count, arrays.rounding);
    } else {
      CastTwice(arrays);
    }
  });
}

cudaError_t LaunchAccumulate(cudaStream_t stream, const AccumulateArrays& arrays) {
  return Launch("LaunchAccumulate", stream, [arrays] { Accumulate(Team(), arrays); });
}

cudaError_t LaunchSumSquares(cudaStream_t stream, const AccumulateArrays& arrays, double* blocks,
                             double* sum) {
  return Launch("LaunchSumSquares", stream, [arrays, blocks, sum] {
    const auto count = static_cast<size_t>(NormBlocks(arrays.count));
    *sum = AccumulateAndSumSquares(Team(), arrays, {blocks, count});
  });
}

cudaError_t LaunchAddTo(cudaStream_t stream, const float* value, double* sum) {
  return Launch("LaunchAddTo", stream, [value, sum] { *sum += double{*value}; });
}

cudaError_t LaunchUpdate(cudaStream_t stream, UpdateRule rule, const UpdateArrays& arrays,
                         const UpdateConstants* constants) {
  return Launch("LaunchUpdate", stream,
                [rule, arrays, constants] { Update(Team(), rule, arrays, *constants); });
}

}  // namespace ebb::optim
