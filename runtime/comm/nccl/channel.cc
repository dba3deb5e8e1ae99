#include "ebb/runtime/comm/nccl/channel.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "ebb/runtime/device/cuda/context.h"

namespace ebb {
namespace {

// Between looks at a call in progress: most are ready in microseconds, those that connect ranks in
// seconds.
constexpr std::chrono::microseconds kFirstPause{5}, kLongestPause{1000};

}  // namespace

NcclChannel::~NcclChannel() {
  const std::scoped_lock lock(calls_);
  if (comm_ == nullptr) return;
  const CudaCurrent current(device_);
  nccl_.CommAbort(comm_);
}

void NcclChannel::Close(WaitPoint::Deadline deadline) {
  const absl::Status finalised =
      Call("ncclCommFinalize", [&](ncclComm_t& comm) { return nccl_.CommFinalize(comm); });
  if (!finalised.ok() || !AwaitReady(deadline).ok()) return;
  const std::scoped_lock lock(calls_);
  if (comm_ == nullptr) return;
  const CudaCurrent current(device_);
  nccl_.CommDestroy(std::exchange(comm_, nullptr));
}

absl::Status NcclChannel::Call(std::string_view what,
                               absl::FunctionRef<ncclResult_t(ncclComm_t&)> call) {
  const std::scoped_lock lock(calls_);
  if (failed()) return status();
  const CudaCurrent current(device_);
  const ncclResult_t result = call(comm_);
  return NcclStatus(nccl_, result, comm_, what);
}

NcclChannel::State NcclChannel::Poll() {
  const std::scoped_lock lock(calls_);
  if (failed()) return {.error = status()};
  if (comm_ == nullptr) return {};
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = nccl_.CommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess)
    return {.error = NcclStatus(nccl_, asked, comm_, "ncclCommGetAsyncError")};
  return {.error = NcclStatus(nccl_, state, comm_, "NCCL"), .in_progress = state == ncclInProgress};
}

absl::Status NcclChannel::AwaitReady(WaitPoint::Deadline deadline) {
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const State state = Poll();
    if (!state.error.ok() || !state.in_progress) return state.error;
    if (WaitPoint::Clock::now() >= deadline) return absl::DeadlineExceededError("");
    std::this_thread::sleep_for(pause);
  }
}

absl::Status NcclChannel::AsynchronousError() {
  return Poll().error;
}

void NcclChannel::Fail(const absl::Status& why) {
  {
    const std::scoped_lock lock(mutex_);
    if (!status_.ok()) return;
    status_ = why;
    failed_.store(true, std::memory_order_release);
  }
  const std::scoped_lock lock(calls_);
  if (comm_ == nullptr) return;
  const CudaCurrent current(device_);
  nccl_.CommAbort(std::exchange(comm_, nullptr));
}

absl::Status NcclChannel::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

}  // namespace ebb
