#include "ebb/runtime/engine/outcome/step_errors.h"

#include <utility>

namespace ebb {

void StepErrors::Open(int parity) {
  const std::lock_guard lock(mutex_);
  outer_parity_ = is_open_ ? parity_ : kEvaluation;
  outer_ = std::exchange(own_, absl::OkStatus());
  is_open_ = true;
  parity_ = parity;
  if (parity_ != kEvaluation) blocked_[parity_] = false;
  NoteLocked(failed_);
  NoteLocked(unreported_);
}

void StepErrors::Close() {
  const std::lock_guard lock(mutex_);
  is_open_ = outer_parity_ != kEvaluation;
  parity_ = std::exchange(outer_parity_, kEvaluation);
  own_ = std::exchange(outer_, absl::OkStatus());
}

void StepErrors::NoteLocked(const absl::Status& status) {
  if (!is_open_ || status.ok()) return;
  if (own_.ok()) own_ = status;
  if (parity_ != kEvaluation) Block(parity_);
}

void StepErrors::Note(absl::Status status) {
  const std::lock_guard lock(mutex_);
  NoteLocked(status);
}

void StepErrors::Fail(absl::Status status) {
  const std::lock_guard lock(mutex_);
  if (!failed_.ok() || status.ok()) return;
  failed_ = std::move(status);
  has_failed_.store(true, std::memory_order_release);
}

absl::Status StepErrors::PeekLocked() const {
  if (!unreported_.ok()) return unreported_;
  return failed_.ok() ? own_ : failed_;
}

absl::Status StepErrors::Report() {
  const std::lock_guard lock(mutex_);
  absl::Status reported = PeekLocked();
  if (reported.ok()) return reported;
  failure_reported_ = failure_reported_ || reported == failed_;
  unreported_ = absl::OkStatus();
  known_ = exchanges_;
  return reported;
}

absl::Status StepErrors::Peek() const {
  const std::lock_guard lock(mutex_);
  return PeekLocked();
}

absl::Status StepErrors::failure() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

int64_t StepErrors::NextExchange() {
  const std::lock_guard lock(mutex_);
  return ++exchanges_;
}

int64_t StepErrors::known_exchange() const {
  const std::lock_guard lock(mutex_);
  return known_;
}

void StepErrors::NoteJudged(const absl::Status& status, int64_t cause) {
  const std::lock_guard lock(mutex_);
  if (cause > known_ && unreported_.ok()) unreported_ = status;
  NoteLocked(unreported_);
}

bool StepErrors::has_unreported() const {
  const std::lock_guard lock(mutex_);
  return !unreported_.ok();
}

absl::Status StepErrors::UnreportedFailure() const {
  const std::lock_guard lock(mutex_);
  return failure_reported_ ? absl::OkStatus() : failed_;
}

}  // namespace ebb
