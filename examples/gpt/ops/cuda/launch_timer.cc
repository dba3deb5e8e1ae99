#include "ops/cuda/launch_timer.h"

#include <algorithm>
#include <limits>

#include "ebb/runtime/device/cuda/error.h"
#include "status_macros.h"

namespace ebb::gpt::cuda {
namespace {

// Several launches are timed together, so that the queue is not empty between short ones.
constexpr int kRepetitions = 3, kLaunches = 3;

}  // namespace

absl::StatusOr<LaunchTimer> LaunchTimer::Create(cudaStream_t stream) {
  LaunchTimer timer(stream);
  for (Event* event : {&timer.begin_, &timer.end_}) {
    cudaEvent_t made = nullptr;
    GPT_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&made, cudaEventDefault),
                                   "creating an event that measures"));
    event->reset(made);
  }
  return timer;
}

absl::StatusOr<float> LaunchTimer::Milliseconds(absl::FunctionRef<absl::Status()> enqueue) {
  GPT_RETURN_IF_ERROR(enqueue());
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < kRepetitions; ++i) {
    cudaError_t result = cudaEventRecord(begin_.get(), stream_);
    for (int n = 0; n < kLaunches; ++n) GPT_RETURN_IF_ERROR(enqueue());
    if (result == cudaSuccess) result = cudaEventRecord(end_.get(), stream_);
    if (result == cudaSuccess) result = cudaEventSynchronize(end_.get());
    float took = 0;
    if (result == cudaSuccess) result = cudaEventElapsedTime(&took, begin_.get(), end_.get());
    GPT_RETURN_IF_ERROR(CudaStatus(result, "timing a product"));
    least = std::min(least, took / kLaunches);
  }
  return least;
}

}  // namespace ebb::gpt::cuda
