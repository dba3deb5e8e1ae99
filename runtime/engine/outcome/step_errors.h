// Errors, and whether the caller knows them: the failure of the engine, which is final; the error
// of the open step or evaluation; and the error of a judged step that no call has returned.
//
// Note and Fail take errors, Report and Peek return them. Every call of the engine that returns a
// Status ends in Report.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "absl/status/status.h"

namespace ebb {

class StepErrors {
 public:
  static constexpr int kEvaluation = -1;

  // Opens a step of this parity, or an evaluation, also one within a step. The step begins with
  // errors that no call has returned. Closing ends the newest one.
  void Open(int parity);
  void Close();

  // The open step's error: the first sticks, and the step starts no more early updates.
  void Note(absl::Status status);
  // The engine has failed, for good. The first failure is kept as the cause, because others follow
  // from it. Any thread.
  void Fail(absl::Status status);
  // The oldest error that no call has returned, for a call that returns it now. Each call returns a
  // failure of the engine, or the error of the open step, again.
  absl::Status Report();
  // Report's error, which still counts as unreported. Any thread.
  absl::Status Peek() const;

  // Any thread.
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  absl::Status failure() const;
  bool blocked(int parity) const { return blocked_[parity].load(std::memory_order_acquire); }
  void Block(int parity) { blocked_[parity].store(true, std::memory_order_release); }

  // Exchanges of this engine's ranks are counted from 1.
  int64_t NextExchange();
  // This rank's caller knows the errors of exchanges up to this one.
  int64_t known_exchange() const;
  // The error of a judged step, to be reported. `cause`: the exchange to blame; the caller may know
  // its error already.
  void NoteJudged(const absl::Status& status, int64_t cause);
  // An error of a judged step has not been reported.
  bool has_unreported() const;
  // A failure of the engine that no call has returned.
  absl::Status UnreportedFailure() const;

 private:
  absl::Status PeekLocked() const;
  void NoteLocked(const absl::Status& status);

  mutable std::mutex mutex_;
  absl::Status failed_, unreported_, own_;  // of the engine, of a judged step, of the open one
  absl::Status outer_;                      // of the step around an open evaluation
  int outer_parity_ = kEvaluation;          // the parity of that step; kEvaluation: there is none
  bool failure_reported_ = false;
  bool is_open_ = false;
  int parity_ = kEvaluation;  // of the open step
  int64_t exchanges_ = 0, known_ = 0;
  std::atomic<bool> has_failed_ = false;
  std::atomic<bool> blocked_[2] = {};  // by parity
};

}  // namespace ebb
