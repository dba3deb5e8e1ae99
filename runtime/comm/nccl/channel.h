// Owns one ncclComm_t: its calls one at a time, none of which blocks, its asynchronous errors, and
// its end, which is ncclCommAbort as soon as something has failed.
#pragma once

#include <nccl.h>

#include <atomic>
#include <mutex>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class NcclChannel {
 public:
  // `device`: the ordinal of the CUDA device of all its calls.
  NcclChannel(const NcclLibrary& nccl, int device) : nccl_(nccl), device_(device) {}
  // Lets go of a communicator in order, as long as nothing has failed; other ranks are waited for
  // until the deadline.
  void Close(WaitPoint::Deadline deadline);
  // Aborts what has not been closed.
  ~NcclChannel();

  // Runs `call` on the channel's device; `what` is for messages. An error does not fail the
  // channel: that is its user's to decide.
  absl::Status Call(std::string_view what, absl::FunctionRef<ncclResult_t(ncclComm_t&)> call);
  // Waits until the calls before have done their part on the host, which takes the other ranks the
  // first time. kDeadlineExceeded, without words.
  absl::Status AwaitReady(WaitPoint::Deadline deadline);
  // An error that has come up meanwhile.
  absl::Status AsynchronousError();

  // Ends the operations of this rank, running and later ones; what they receive into is undefined.
  // The first failure stays. Any thread.
  void Fail(const absl::Status& why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status status() const;

 private:
  struct State {
    absl::Status error;
    bool in_progress = false;
  };
  State Poll();

  const NcclLibrary& nccl_;
  const int device_;
  std::mutex calls_;  // around every use of comm_
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  absl::Status status_;
};

}  // namespace ebb
