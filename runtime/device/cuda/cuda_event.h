// An event of a CUDA device. Its last record is on a CUDA stream, in a CUDA event without timing,
// or on a host stream, as a place in that stream. It owns the device's shared state, so it may
// outlive streams and the device's last handle. CUDA allows its event to be destroyed while waits
// for it are enqueued, and a wait for a place refers to the place alone.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cpu/cpu_event.h"
#include "ebb/runtime/device/cuda/context.h"

namespace ebb {

class CudaEvent : public EventBackend {
 public:
  struct Place {
    bool recorded = false;
    CpuEvent::Place host;  // empty: the last record is on a stream of the device
    bool on_host() const { return host.tickets != nullptr; }
  };

  // `awaited`: threads that wait for it sleep.
  static absl::StatusOr<std::unique_ptr<CudaEvent>> Create(std::shared_ptr<CudaContext> context,
                                                           bool awaited);
  ~CudaEvent() override;

  void HostWait() const override;
  // A record on a device that has failed counts as passed, so that no thread waits for it.
  bool Passed() const override;

  cudaEvent_t native() const { return event_; }
  Place place() const;
  void SetPlace(const Place& place);

 private:
  CudaEvent(std::shared_ptr<CudaContext> context, cudaEvent_t event)
      : context_(std::move(context)), event_(event) {}

  const std::shared_ptr<CudaContext> context_;
  const cudaEvent_t event_;
  mutable std::mutex mutex_;  // one thread may wait while another records
  Place place_;
};

}  // namespace ebb
