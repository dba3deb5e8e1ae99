// What has gone wrong, and what of it the caller knows: the failure of the engine, which is for good, the
// error of the open step or evaluation, and that of a judged step that no call has returned yet.
//
// Note, Fail, Tell and Known are all that the engine says and asks. Every call of the engine that returns
// a Status ends in Tell.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "absl/status/status.h"

namespace ebb {

class StepErrors {
 public:
  static constexpr int kEvaluation = -1;

  // A step of this parity is open from now on, or an evaluation, also one within a step. It begins with
  // what no call has returned. Closed is what was opened last.
  void Open(int parity);
  void Close();

  // Of the open step: the first error sticks, and no early update of that step may start any more.
  void Note(absl::Status status);
  // The engine has failed, for good. The first failure is the cause, since others follow from it. Any
  // thread.
  void Fail(absl::Status status);
  // The oldest error that no call has returned, for a call that returns it now. A failure of the engine
  // and the error of the open step are told again by each call.
  absl::Status Tell();
  // The same without telling. Any thread.
  absl::Status Known() const;

  // Any thread.
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  absl::Status failure() const;
  bool blocked(int parity) const { return blocked_[parity].load(std::memory_order_acquire); }
  void Block(int parity) { blocked_[parity].store(true, std::memory_order_release); }

  // Exchanges of this engine's ranks are counted from 1.
  int64_t NextExchange();
  // This rank's caller knows the errors of exchanges up to this one.
  int64_t known_exchange() const;
  // The error of a step that was judged, to be told. `cause`: the exchange that is to blame, which the
  // caller may know already.
  void Learn(const absl::Status& status, int64_t cause);
  // An error of a judged step waits to be told.
  bool has_untold() const;
  // A failure that no call has returned.
  absl::Status UntoldFailure() const;

 private:
  absl::Status KnownLocked() const;
  void NoteLocked(const absl::Status& status);

  mutable std::mutex mutex_;
  absl::Status failed_, untold_, own_;  // of the engine, of a judged step, of the open one
  absl::Status outer_;                  // of the step in which an evaluation is open
  int outer_parity_ = kEvaluation;      // of that; kEvaluation: there is none
  bool failure_told_ = false;
  bool is_open_ = false;
  int parity_ = kEvaluation;  // of the open step
  int64_t exchanges_ = 0, known_ = 0;
  std::atomic<bool> has_failed_ = false;
  std::atomic<bool> blocked_[2] = {};  // by parity
};

}  // namespace ebb
