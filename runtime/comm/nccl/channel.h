// Owns one ncclComm_t: its calls one at a time, none of which blocks, its asynchronous errors, and
// its end, which is ncclCommAbort as soon as something has failed.
//
// ncclCommAbort blocks. First it tells the kernels of its own communicator to end, then it gives back
// memory, and so waits for the whole device, where kernels of other communicators wait for the same
// dead rank and have not been told. So every channel aborts on a thread of its own, and none waits for
// another. The thread is there from the first: a failure is also noticed by host functions, which may
// call no CUDA, and the system may grant no thread by then. NCCL's groups would do for channels that are
// ready, from 2.22 on; not for one whose launch is under way, because each ncclCommAbort of a group
// waits for that before the next one is called.
//
// Communicators do not block (ncclConfig_t::blocking 0), which costs each operation a thread of NCCL's,
// made and joined. Only so may ncclCommAbort come while a call has not finished: it ends and joins that
// thread, and would otherwise free what a call that blocks goes on using (NCCL's user guide, "Fault
// Tolerance", asks for it).
#pragma once

#include <nccl.h>

#include <atomic>
#include <latch>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class NcclChannel {
 public:
  // `device`: the ordinal of the CUDA device of all its calls.
  static absl::StatusOr<std::shared_ptr<NcclChannel>> Create(const NcclLibrary& nccl, int device);
  // Lets go of a communicator in order, unless something has failed; other ranks are waited for
  // until the deadline.
  void Close(WaitPoint::Deadline deadline);
  // Aborts what has not been closed; waits for an abort that has begun.
  ~NcclChannel();

  // Runs `call` on the channel's device; `what` is for messages. An error does not fail the
  // channel: that is its user's to decide.
  absl::Status Call(std::string_view what, absl::FunctionRef<ncclResult_t(ncclComm_t&)> call);
  // Waits until the calls before have done their part on the host, which takes the other ranks the
  // first time. kDeadlineExceeded, without words.
  absl::Status AwaitReady(WaitPoint::Deadline deadline);
  // An error that has come up meanwhile. Waits for no call: beside one there is none.
  absl::Status AsynchronousError();

  // Ends the operations of this rank, running and later ones; what they receive into is undefined.
  // The first failure stays. Any thread, host functions too; waits for nothing and calls no CUDA.
  void Fail(const absl::Status& why);
  // After Fail: until NCCL is done with the communicator, and with what it was given to write to.
  void WaitAborted() const { aborted_.wait(); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status status() const;

 private:
  NcclChannel(const NcclLibrary& nccl, int device) : nccl_(nccl), device_(device) {}

  struct State {
    absl::Status error;
    bool in_progress = false;
  };
  State Poll();
  State PollLocked();
  void Abort();
  void AbortOnceFailed();

  const NcclLibrary& nccl_;
  const int device_;
  std::mutex calls_;  // around every use of comm_
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  absl::Status status_;
  std::atomic<bool> ends_{false};
  WaitPoint changed_;
  std::thread abort_;
  std::latch aborted_{1};
};

}  // namespace ebb
