// An event of CUDA, without timing. It holds the device's shared state, and so may outlive streams
// and the last handle of the device; CUDA lets it be destroyed while waits for it are enqueued.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cuda/context.h"

namespace ebb {

class CudaEvent : public EventBackend {
 public:
  static absl::StatusOr<std::unique_ptr<CudaEvent>> Create(std::shared_ptr<CudaContext> context);
  ~CudaEvent() override;

  void HostWait() const override;
  // True also once the device has failed: nobody waits for what will not come.
  bool Passed() const override;

  cudaEvent_t native() const { return event_; }

 private:
  CudaEvent(std::shared_ptr<CudaContext> context, cudaEvent_t event)
      : context_(std::move(context)), event_(event) {}

  const std::shared_ptr<CudaContext> context_;
  const cudaEvent_t event_;
};

}  // namespace ebb
