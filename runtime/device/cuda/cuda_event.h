// An event of a CUDA device: its last record is on a stream of CUDA, in an event of CUDA's without
// timing, or on a host stream, as a place in that. It holds the device's shared state, and so may
// outlive streams and the last handle of the device; CUDA lets its event be destroyed while waits
// for it are enqueued, and waits for a place name the place alone.
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
    CpuEvent::Place host;  // on no host stream: on one of the device
    bool on_host() const { return host.progress != nullptr; }
  };

  // `awaited`: threads that wait for it sleep.
  static absl::StatusOr<std::unique_ptr<CudaEvent>> Create(std::shared_ptr<CudaContext> context,
                                                           bool awaited);
  ~CudaEvent() override;

  void HostWait() const override;
  // Of a record on the device true also once that has failed: nobody waits for what will not come.
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
