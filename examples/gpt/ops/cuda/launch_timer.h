// How long the device takes for what is enqueued on a stream, before training: it waits for it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb::gpt::cuda {

class LaunchTimer {
 public:
  // For a stream of the current device.
  static absl::StatusOr<LaunchTimer> Create(cudaStream_t stream);

  // Of one call of `enqueue`, the least of a few measurements; a first call is not measured, as it loads
  // kernels.
  absl::StatusOr<float> Milliseconds(absl::FunctionRef<absl::Status()> enqueue);

 private:
  using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, decltype(&cudaEventDestroy)>;

  explicit LaunchTimer(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream_;
  Event begin_{nullptr, &cudaEventDestroy}, end_{nullptr, &cudaEventDestroy};
};

}  // namespace ebb::gpt::cuda
