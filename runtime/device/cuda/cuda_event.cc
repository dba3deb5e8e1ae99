#include "ebb/runtime/device/cuda/cuda_event.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/error.h"
#include "ebb/runtime/device/cuda/order_observer.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CudaEvent>> CudaEvent::Create(std::shared_ptr<CudaContext> context,
                                                             bool awaited) {
  EBB_RETURN_IF_ERROR(context->status());
  const CudaCurrent current(context->ordinal());
  // Blocking synchronisation is only for events that threads wait for: streams and queries are
  // fastest without it (cudaEventCreateWithFlags).
  const unsigned flags = cudaEventDisableTiming | (awaited ? cudaEventBlockingSync : 0u);
  cudaEvent_t event = nullptr;
  EBB_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, flags),
                                 absl::StrCat("creating an event of ", context->name())));
  return std::unique_ptr<CudaEvent>(new CudaEvent(std::move(context), event));
}

CudaEvent::~CudaEvent() {
  const CudaCurrent current(context_->ordinal());
  cudaEventDestroy(event_);
}

CudaEvent::Place CudaEvent::place() const {
  const std::scoped_lock lock(mutex_);
  return place_;
}

void CudaEvent::SetPlace(const Place& place) {
  const std::scoped_lock lock(mutex_);
  place_ = place;
}

void CudaEvent::HostWait() const {
  if (const Place last = place(); last.on_host()) {
    last.host.Await();
    if (OrderObserver* const observer = OrderObserver::Current()) observer->HostPassed(last.host);
    return;
  }
  if (context_->failed()) return;
  const CudaCurrent current(context_->ordinal());
  context_->Check(cudaEventSynchronize(event_), "cudaEventSynchronize", "an event");
}

bool CudaEvent::Passed() const {
  if (const Place last = place(); last.on_host()) {
    if (!last.host.Passed()) return false;
    if (OrderObserver* const observer = OrderObserver::Current()) observer->HostPassed(last.host);
    return true;
  }
  if (context_->failed()) return true;
  const CudaCurrent current(context_->ordinal());
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) {
    cudaGetLastError();  // so that a trainer does not find it as CUDA's last error
    return false;
  }
  context_->Check(result, "cudaEventQuery", "an event");
  return true;
}

}  // namespace ebb
