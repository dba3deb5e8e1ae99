// Where ranks come together outside of steps, before one of them changes what the others build on:
// all call the same, or every rank gets a Status.
//
// First a barrier on each of the communicators that steps use: a rank that steps or evaluates meets
// it there with a collective that does not fit, so nobody waits for the time-out. Then the records
// of all ranks, on the host.
#include "ebb/runtime/engine/meeting.h"

#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {

// `subject`: what must be the same on all ranks beside the call itself. `own`: this rank's error,
// which then is every rank's, and nothing has happened.
absl::Status Executor::Meet(Meeting meeting, int64_t subject, const absl::Status& own) {
  progress_.log.clear();
  progress_.hash = 0;
  LogEntry(++last_number_);
  LogEntry(static_cast<int64_t>(meeting));
  LogEntry(subject);
  if (errors_.has_failed()) {
    peers_.Abort(errors_.failure());
    return Withdraw();
  }
  Verdict ranks;
  for (std::optional<Communicator>* communicator : peers_.of_steps()) {
    if (!communicator->has_value()) continue;
    Stream& stream = communicator == &gather_communicator_ ? *gather_ : *reduce_;
    peers_.NoteCollective(**communicator, (*communicator)->Barrier(stream), errors_);
    Compute(stream, [this, communicator] { NoteIfBroken(**communicator, ""); });
  }
  gather_->WaitIdle();
  reduce_->WaitIdle();
  absl::Status broken = peers_.Broken();
  if (broken.ok()) {
    ExchangeRecord record{.scopes_hash = progress_.hash};
    if (!own.ok()) record.SetError(own);
    broken = GatherRecords(Control(), record, control_block_->records(0));
    if (broken.ok()) {
      ranks = Conclude(control_block_->records(0));
    } else {
      broken = Located(broken);
      errors_.Fail(
          absl::Status(broken.code(), absl::StrCat("the engine has failed: ", broken.message())));
    }
  } else if (!absl::IsFailedPrecondition(broken) && !absl::IsDeadlineExceeded(broken)) {
    // Where shards are repeated others may not have it, and wait for this rank's record.
    control_->Abort(broken);
  }
  const absl::Status agreed = outcome_->Agree(progress_.log, ranks);
  return own.ok() || errors_.has_failed() ? agreed : own;
}

absl::Status Executor::Agree(const absl::Status& own, std::string_view about) {
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        "Agree while a Step or Evaluation of the engine is alive: finish or drop it first");
  }
  calls_.Note(CallKind::kAgree);
  const absl::Status settled = Settle();
  return Meet(Meeting::kAgree, static_cast<int64_t>(sharding::Hasher().Add(about).hash()),
              settled.ok() ? own : settled);
}

bool IsMeeting(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] >= static_cast<int64_t>(Meeting::kSuspend);
}

bool IsEvaluation(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] < 0;
}

// The second entry of a log, in words.
std::string DescribeBegun(int64_t begun) {
  switch (static_cast<Meeting>(begun)) {
    case Meeting::kSuspend:
      return "calls Suspend";
    case Meeting::kResume:
      return "calls Resume";
    case Meeting::kCopyInto:
      return "calls CopyParametersFrom";
    case Meeting::kCopyFrom:
      return "copies its parameters into another engine";
    case Meeting::kSetTrainingState:
      return "calls SetTrainingState";
    case Meeting::kAgree:
      return "calls Agree";
  }
  return begun < 0 ? "is in an evaluation" : "is in a step";
}

}  // namespace ebb
