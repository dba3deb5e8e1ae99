#include "ebb/runtime/device/cuda/cuda_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/cuda_event.h"
#include "ebb/runtime/device/cuda/error.h"
#include "ebb/runtime/device/cuda/order_observer.h"

namespace ebb {
namespace {

std::string NameOf(std::string_view name) {
  return absl::StrCat("stream '", absl::string_view(name.data(), name.size()), "'");
}

void Destroy(cudaStream_t stream, int device) {
  const CudaCurrent current(device);
  cudaStreamDestroy(stream);
}

}  // namespace

absl::StatusOr<SharedCudaStream> NewCudaStream(const CudaContext& context, std::string_view name,
                                               StreamPriority priority) {
  const CudaCurrent current(context.ordinal());
  const std::string what = absl::StrCat("creating ", NameOf(name), " of ", context.name());
  int least = 0, greatest = 0;
  EBB_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), what));
  const bool comes_first = priority == StreamPriority::kFirst;
  cudaStream_t stream = nullptr;
  EBB_RETURN_IF_ERROR(CudaStatus(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, comes_first ? greatest : least),
      what));
  return SharedCudaStream(
      stream, [ordinal = context.ordinal()](cudaStream_t owned) { Destroy(owned, ordinal); });
}

CudaStream::CudaStream(std::shared_ptr<CudaContext> context, std::shared_ptr<ThreadTeam> team,
                       SharedCudaStream stream, std::string_view name, int tasks_max)
    : context_(std::move(context)),
      team_(std::move(team)),
      stream_(std::move(stream)),
      name_(NameOf(name)),
      tasks_(tasks_max) {}

CudaStream::~CudaStream() {
  WaitIdle();
}

void CudaStream::Enqueue(const Task& task) {
  const CudaCurrent current(context_->ordinal());
  HostTasks::Place* place = nullptr;
  while (!context_->failed() && place == nullptr) {
    place = tasks_.TryPut(task, WaitPoint::Clock::now() + kLookEvery);
    if (place != nullptr) break;
    const cudaError_t state = cudaStreamQuery(stream_.get());
    if (state != cudaErrorNotReady) {
      Check(state, "cudaStreamQuery");
    } else {
      cudaGetLastError();  // so that a trainer does not find it as CUDA's last error
    }
  }
  if (place != nullptr &&
      Check(cudaLaunchHostFunc(stream_.get(), &HostTasks::Run, place), "cudaLaunchHostFunc"))
    return;
  // The device has failed. The stream's tasks still run, in order.
  WaitIdle();
  if (place == nullptr) task();
}

void CudaStream::Copy(void* destination, const void* source, int64_t bytes) {
  if (bytes == 0 || context_->failed()) return;
  const CudaCurrent current(context_->ordinal());
  Check(cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes), cudaMemcpyDefault,
                        stream_.get()),
        "cudaMemcpyAsync");
}

void CudaStream::Zero(void* destination, int64_t bytes) {
  if (bytes == 0 || context_->failed()) return;
  const CudaCurrent current(context_->ordinal());
  Check(cudaMemsetAsync(destination, 0, static_cast<size_t>(bytes), stream_.get()),
        "cudaMemsetAsync");
}

void CudaStream::Wait(const EventBackend& event) {
  if (context_->failed()) return;
  const CudaCurrent current(context_->ordinal());
  const auto& awaited = static_cast<const CudaEvent&>(event);
  const CudaEvent::Place place = awaited.place();
  if (!place.on_host()) {
    Check(cudaStreamWaitEvent(stream_.get(), awaited.native(), 0), "cudaStreamWaitEvent");
    return;
  }
  if (OrderObserver* const observer = OrderObserver::Current())
    observer->WaitForHost(stream_.get(), place.host);
  if (place.host.Passed()) return;
  Check(context_->host_order().EnqueueWait(stream_.get(), place.host), "cuStreamWaitValue64");
}

void CudaStream::Record(EventBackend& event) {
  auto& recorded = static_cast<CudaEvent&>(event);
  recorded.SetPlace({.recorded = true, .host = {}});
  if (context_->failed()) return;
  const CudaCurrent current(context_->ordinal());
  Check(cudaEventRecord(recorded.native(), stream_.get()), "cudaEventRecord");
}

void CudaStream::WaitIdle() {
  const CudaCurrent current(context_->ordinal());
  const cudaError_t result = cudaStreamSynchronize(stream_.get());
  Check(result, "cudaStreamSynchronize");
  if (context_->failed()) tasks_.RunAbandoned();
}

}  // namespace ebb
