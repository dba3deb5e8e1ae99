#include "ebb/runtime/device/cuda/cuda_host_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/cuda_event.h"
#include "ebb/runtime/device/cuda/order_observer.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CudaHostStream>> CudaHostStream::Create(
    std::shared_ptr<CudaContext> context, std::shared_ptr<ThreadTeam> team, std::string_view name,
    int tasks_max) {
  EBB_ASSIGN_OR_RETURN(SharedCudaStream crossing, NewCudaStream(*context, name));
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<CpuStream> thread,
                       context->host_order().NewThread(*context, name, tasks_max, std::move(team)));
  std::unique_ptr<CudaHostStream> made(
      new CudaHostStream(std::move(context), std::move(crossing), std::move(thread), name));
  EBB_RETURN_IF_ERROR(made->context_->failure_watch().Add(made->crossing_.get(), made->name_));
  return made;
}

CudaHostStream::CudaHostStream(std::shared_ptr<CudaContext> context, SharedCudaStream crossing,
                               std::unique_ptr<CpuStream> thread, std::string_view name)
    : context_(std::move(context)),
      name_(absl::StrCat("host stream '", absl::string_view(name.data(), name.size()), "'")),
      crossed_(context_->host_order().crossings().Take()),
      crossing_(std::move(crossing)),
      thread_(std::move(thread)) {}

CudaHostStream::~CudaHostStream() {
  thread_.reset();
  context_->failure_watch().Remove(crossing_.get());
  const CudaCurrent current(context_->ordinal());
  // All waits have crossed, but the last host function may not have returned yet.
  Check(cudaStreamSynchronize(crossing_.get()), "cudaStreamSynchronize");
  crossing_.reset();
  // A failed device loses its crossings, so the next stream's count would be too low. But there is
  // no next stream then.
  context_->host_order().crossings().GiveBack(crossed_);
}

void CudaHostStream::Copy(void* destination, const void* source, int64_t bytes) {
  if (OrderObserver* const observer = OrderObserver::Current())
    observer->HostCopy(crossing_.get(), destination, source, bytes);
  thread_->Copy(destination, source, bytes);
}

void CudaHostStream::Zero(void* destination, int64_t bytes) {
  if (OrderObserver* const observer = OrderObserver::Current())
    observer->HostCopy(crossing_.get(), destination, nullptr, bytes);
  thread_->Zero(destination, bytes);
}

void CudaHostStream::Wait(const EventBackend& event) {
  const auto& awaited = static_cast<const CudaEvent&>(event);
  const CudaEvent::Place place = awaited.place();
  if (place.on_host()) {
    if (OrderObserver* const observer = OrderObserver::Current())
      observer->WaitForHost(crossing_.get(), place.host);
    thread_->WaitFor(place.host);
  } else if (place.recorded && !context_->failed()) {
    WaitForDevice(awaited.native());
  }
}

void CudaHostStream::WaitForDevice(cudaEvent_t event) {
  // CUDA waits for the record as of now, also if another is recorded before the thread gets there.
  const CudaCurrent current(context_->ordinal());
  if (!Check(cudaStreamWaitEvent(crossing_.get(), event, 0), "cudaStreamWaitEvent")) return;
  const auto cross = [](void* crossed) { static_cast<Tickets*>(crossed)->PassNext(); };
  if (!Check(cudaLaunchHostFunc(crossing_.get(), cross, crossed_), "cudaLaunchHostFunc")) return;
  const int64_t ticket = crossed_->TakeTicket();
  thread_->Enqueue(Task([this, ticket] { AwaitCrossing(ticket); }));
}

void CudaHostStream::AwaitCrossing(int64_t ticket) {
  while (!context_->failed() && !crossed_->Await(ticket, WaitPoint::Clock::now() + kLookEvery))
    context_->failure_watch().Look();
}

void CudaHostStream::Record(EventBackend& event) {
  const CpuEvent::Place place = thread_->EnqueuePlace();
  if (OrderObserver* const observer = OrderObserver::Current())
    observer->HostRecord(crossing_.get(), place);
  static_cast<CudaEvent&>(event).SetPlace({.recorded = true, .host = place});
}

void CudaHostStream::WaitIdle() {
  const CpuEvent::Place place = thread_->EnqueuePlace();
  if (OrderObserver* const observer = OrderObserver::Current())
    observer->HostRecord(crossing_.get(), place);
  place.Await();
  if (OrderObserver* const observer = OrderObserver::Current()) observer->HostPassed(place);
}

}  // namespace ebb
