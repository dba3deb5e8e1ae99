#include "ebb/runtime/device/cuda/cuda_event.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CudaEvent>> CudaEvent::Create(std::shared_ptr<CudaContext> context) {
  EBB_RETURN_IF_ERROR(context->status());
  const CudaCurrent current(context->ordinal());
  cudaEvent_t event = nullptr;
  EBB_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                 absl::StrCat("creating an event of ", context->name())));
  return std::unique_ptr<CudaEvent>(new CudaEvent(std::move(context), event));
}

CudaEvent::~CudaEvent() {
  cudaEventDestroy(event_);
}

void CudaEvent::HostWait() const {
  if (context_->failed()) return;
  context_->Check(cudaEventSynchronize(event_), "cudaEventSynchronize", "an event");
}

bool CudaEvent::Passed() const {
  if (context_->failed()) return true;
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) return false;
  context_->Check(result, "cudaEventQuery", "an event");
  return true;
}

}  // namespace ebb
