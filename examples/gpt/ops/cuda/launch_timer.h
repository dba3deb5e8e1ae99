// How long the device takes for enqueued work. For use before training, because it waits for the
// stream.
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

  // The least of a few measurements of one call of `enqueue`. The first call is not measured,
  // because it loads kernels.
  absl::StatusOr<float> Milliseconds(absl::FunctionRef<absl::Status()> enqueue);

 private:
  using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, decltype(&cudaEventDestroy)>;

  explicit LaunchTimer(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream_;
  Event begin_{nullptr, &cudaEventDestroy}, end_{nullptr, &cudaEventDestroy};
};

}  // namespace ebb::gpt::cuda
