#include "ebb/runtime/comm/nccl/channel.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// NCCL has to be asked whether a call in progress is ready. An operation is ready within
// microseconds, in which the trainer waits, and a pause takes Linux some 50 us longer than asked.
// So the first looks, for some 200 us, only yield the core. Connecting ranks takes seconds, for
// which no core should be kept busy.
constexpr int kLooksWithoutPause = 400;
constexpr std::chrono::microseconds kFirstPause{50}, kLongestPause{1000};

// NCCL_WIN_COLL_SYMMETRIC, which headers before 2.27 lack.
constexpr int kSymmetric = 1;

}  // namespace

absl::StatusOr<std::shared_ptr<NcclChannel>> NcclChannel::Create(
    const NcclLibrary& nccl, int device, std::shared_ptr<WorldFailure> failure) {
  std::shared_ptr<NcclChannel> channel(new NcclChannel(nccl, device, std::move(failure)));
  try {
    channel->abort_ = std::thread([raw = channel.get()] { raw->AbortOnceFailed(); });
  } catch (const std::system_error& error) {
    return NoThread("cannot start the thread that ends what waits in a communicator of NCCL",
                    error);
  }
  return channel;
}

NcclChannel::~NcclChannel() {
  ends_.store(true, std::memory_order_release);
  failure_->changed().Notify();
  if (abort_.joinable()) abort_.join();
  Abort();
}

void NcclChannel::AbortOnceFailed() {
  pthread_setname_np(pthread_self(), "ebb-nccl-abort");
  failure_->changed().Await([this] { return failed() || ends_.load(std::memory_order_acquire); });
  if (!failed()) return;
  // NCCL's requests to CUDA are harmless while another thread captures a graph.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  Abort();
  aborted_.count_down();
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
  if (failed()) return failure_->Get();
  const CudaCurrent current(device_);
  const ncclResult_t result = call(comm_);
  return NcclStatus(nccl_, result, comm_, what);
}

NcclChannel::State NcclChannel::Poll() {
  const std::scoped_lock lock(calls_);
  return PollLocked();
}

NcclChannel::State NcclChannel::PollLocked() {
  if (failed()) return {.error = failure_->Get()};
  if (comm_ == nullptr) return {};
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = nccl_.CommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess)
    return {.error = NcclStatus(nccl_, asked, comm_, "ncclCommGetAsyncError")};
  return {.error = NcclStatus(nccl_, state, comm_, "NCCL"), .in_progress = state == ncclInProgress};
}

absl::Status NcclChannel::AwaitReady(WaitPoint::Deadline deadline) {
  auto pause = kFirstPause;
  for (int looks = 1;; ++looks) {
    const State state = Poll();
    if (!state.error.ok() || !state.in_progress) return state.error;
    if (WaitPoint::Clock::now() >= deadline) return absl::DeadlineExceededError("");
    if (looks < kLooksWithoutPause) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

absl::Status NcclChannel::AsynchronousError() {
  const std::unique_lock lock(calls_, std::try_to_lock);
  return lock.owns_lock() ? PollLocked().error : absl::OkStatus();
}

absl::Status NcclChannel::Register(std::span<std::byte> memory, WaitPoint::Deadline deadline) {
  Registration& made = registrations_.emplace_back();
  if (nccl_.CommWindowRegister != nullptr && nccl_.CommWindowDeregister != nullptr) {
    EBB_RETURN_IF_ERROR(Call("ncclCommWindowRegister", [&](ncclComm_t& comm) {
      return nccl_.CommWindowRegister(comm, memory.data(), memory.size(), &made.window, kSymmetric);
    }));
    EBB_RETURN_IF_ERROR(AwaitReady(deadline));
    if (made.window != nullptr) return absl::OkStatus();
  }
  EBB_RETURN_IF_ERROR(Call("ncclCommRegister", [&](ncclComm_t& comm) {
    return nccl_.CommRegister(comm, memory.data(), memory.size(), &made.handle);
  }));
  EBB_RETURN_IF_ERROR(AwaitReady(deadline));
  if (made.handle != nullptr) return absl::OkStatus();
  registrations_.pop_back();
  return absl::UnimplementedError(
      absl::StrCat("NCCL ", NcclVersionText(nccl_.version),
                   " registers no memory here (NCCL_DEBUG=INFO in the environment says why)"));
}

void NcclChannel::Deregister() {
  for (auto made = registrations_.rbegin(); made != registrations_.rend(); ++made) {
    Call("deregistering", [&](ncclComm_t& comm) {
      if (made->window != nullptr) return nccl_.CommWindowDeregister(comm, made->window);
      return made->handle == nullptr ? ncclSuccess : nccl_.CommDeregister(comm, made->handle);
    }).IgnoreError();
  }
  // A communicator that has failed drops its registrations itself.
  if (!registrations_.empty() && failed()) WaitAborted();
  registrations_.clear();
}

void NcclChannel::Abort() {
  const std::scoped_lock lock(calls_);
  if (comm_ == nullptr) return;
  const CudaCurrent current(device_);
  nccl_.CommAbort(std::exchange(comm_, nullptr));
}

}  // namespace ebb
