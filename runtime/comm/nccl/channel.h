// Owns one ncclComm_t: makes its calls one at a time and without blocking, registers memory with it,
// reports its asynchronous errors, and ends it: by ncclCommAbort once anything has failed.
//
// ncclCommAbort blocks. First it ends the kernels of its own communicator. Then it frees
// memory, which waits for the whole device, where kernels of other communicators wait for the same
// dead rank and have not been ended. So every channel aborts on a thread of its own, and none
// waits for another. The channel starts this thread when it is made, because a host function, which
// may call no CUDA, can notice a failure, and the system may then grant no thread. NCCL's groups
// (from 2.22 on) would do for channels that are ready. Groups would not do for a channel with a
// launch under way, because each ncclCommAbort of a group waits for that launch before the next one
// is called.
//
// Communicators do not block (ncclConfig_t::blocking 0), for which NCCL makes and joins a thread
// for each operation. Only then may ncclCommAbort come while a call has not finished: it ends and
// joins that thread. The abort would free memory that a blocking call still uses (NCCL's user
// guide, "Fault Tolerance", asks for it).
//
// Operations read and write registered memory in place, without copies through NCCL's own buffers,
// and may use algorithms that reach all ranks' memory. The memory is registered as a symmetric
// window (from NCCL 2.27 on), otherwise as a buffer.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <latch>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/rendezvous/store.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class NcclChannel {
 public:
  // `device`: the ordinal of the CUDA device of all its calls. Once `failure` is set, the running
  // and later operations of this rank end; their received memory is undefined.
  static absl::StatusOr<std::shared_ptr<NcclChannel>> Create(const NcclLibrary& nccl, int device,
                                                             std::shared_ptr<WorldFailure> failure);
  // Closes the communicator in order, unless something has failed. Waits for the other ranks until
  // the deadline.
  void Close(WaitPoint::Deadline deadline);
  // Aborts a communicator that has not been closed. Waits for an abort that has begun.
  ~NcclChannel();

  // Runs `call` on the channel's device; `what` is for messages. An error does not fail the
  // channel: its user decides that.
  absl::Status Call(std::string_view what, absl::FunctionRef<ncclResult_t(ncclComm_t&)> call);
  // Waits until the host's part of the earlier calls is done, for which the first call needs the
  // other ranks. kDeadlineExceeded, without a message.
  absl::Status AwaitReady(WaitPoint::Deadline deadline);
  // An error that has come up meanwhile. Does not wait for a call: while one runs, it reports none.
  absl::Status AsynchronousError();

  // Collective. kUnimplemented: NCCL does not take the memory, and the communicator works on
  // without it. Other errors are those of Call and AwaitReady.
  absl::Status Register(std::span<std::byte> memory, WaitPoint::Deadline deadline);
  // Undoes every Register. Call it when no operation uses the memory.
  void Deregister();

  // Call it after a failure. Waits until NCCL uses neither the communicator nor the memory of its
  // operations.
  void WaitAborted() const { aborted_.wait(); }
  bool failed() const { return failure_->is_set(); }

 private:
  NcclChannel(const NcclLibrary& nccl, int device, std::shared_ptr<WorldFailure> failure)
      : nccl_(nccl), device_(device), failure_(std::move(failure)) {}

  struct State {
    absl::Status error;
    bool in_progress = false;
  };
  struct Registration {
    void* window = nullptr;
    void* handle = nullptr;
  };
  State Poll();
  State PollLocked();
  void Abort();
  void AbortOnceFailed();

  const NcclLibrary& nccl_;
  const int device_;
  const std::shared_ptr<WorldFailure> failure_;
  std::mutex calls_;  // around every use of comm_
  ncclComm_t comm_ = nullptr;
  std::list<Registration> registrations_;  // NCCL writes to one while it makes it
  std::atomic<bool> ends_{false};
  std::thread abort_;
  std::latch aborted_{1};
};

}  // namespace ebb
