// The step's first error, who is told of it and of the engine's failure, and what is said of a
// communicator that broke.
#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

void Executor::Stick(absl::Status status) {
  if (progress_.error.ok()) progress_.error = std::move(status);
  if (!progress_.evaluation) blocked_[progress_.parity] = true;
}

void Executor::StickCollective(Communicator& communicator, absl::Status status) {
  if (status.ok()) return;
  communicator.Abort(status);
  Stick(std::move(status));
}

absl::Status Executor::StuckError() const {
  if (absl::Status failed = failures_.Tell(); !failed.ok()) return failed;
  return StepError();
}

absl::Status Executor::UntoldError() const {
  if (absl::Status failed = failures_.failure(); !failed.ok()) return failed;
  return StepError();
}

absl::Status Executor::StepError() const {
  return progress_.alive ? progress_.error : absl::OkStatus();
}

// The last steps and their updates may fail when the trainer asks no more.
void Executor::LogUntoldFailure() const {
  if (const absl::Status failed = failures_.Untold(); !failed.ok())
    LogWarning(absl::StrCat(options_.name, " ", OfRank(rank_, failed).message()));
  if (failures_.has_failed()) return;
  const bool failed = std::any_of(
      std::begin(verdicts_), std::end(verdicts_),
      [this](const StepVerdict& step) { return step.open && step.failed && step.cause > told_; });
  if (failed || !untold_.ok())
    LogWarning(absl::StrCat(options_.name, " rank ", rank_,
                            ": one of the last steps has failed, and nobody has asked for its "
                            "Report"));
}

// The first: others fail in its wake.
absl::Status Executor::CommunicationError() {
  if (absl::Status broken = failures_.broken(); !broken.ok()) return broken;
  for (const std::optional<Communicator>* communicator : StepCommunicators()) {
    if (!communicator->has_value()) continue;
    if (absl::Status status = (*communicator)->status(); !status.ok()) return status;
  }
  return device_.status();
}

// What other ranks are to learn at their next collective.
void Executor::AbortStep(const absl::Status& why) {
  for (std::optional<Communicator>* communicator : StepCommunicators()) {
    if (communicator->has_value()) (*communicator)->Abort(why);
  }
}

// On the operation's stream, after it. The time-out is waited out once: nobody who waits, here or on
// other ranks, in another of the step's communicators waits for that of its own.
void Executor::NoteIfBroken(const Communicator& communicator, std::string_view operation,
                            std::span<const sharding::Part> parts) {
  const absl::Status broken = communicator.status();
  if (broken.ok()) return;
  std::string where;
  // NCCL's operations run long after the host was here, and its communicators fail together.
  if (!world_.connected_by_nccl()) {
    where = operation;
    const char* between = " of unit '";
    for (const sharding::Part& part : parts) {
      absl::StrAppend(&where, between, model_.units[part.unit].name, "'");
      between = ", '";
    }
  }
  if (!failures_.NoteBroken(broken, std::move(where))) return;
  if (absl::IsDeadlineExceeded(broken)) AbortStep(broken);
}

// `broken` of the communicators, and what this rank was doing.
absl::Status Executor::Located(const absl::Status& broken, std::span<const int64_t> log) const {
  std::string where = absl::StrCat("in step ", finished_steps_ + 1);
  if (IsMeeting(log)) {
    where =
        absl::StrCat("with the engine '", options_.name, "' rank ", rank_, " ", Describe(log[1]));
  } else if (IsEvaluation(log)) {
    where = "in an evaluation";
  }
  if (const std::string at = failures_.WhereBroken(broken); !at.empty())
    absl::StrAppend(&where, ", at the ", at);
  if (log.size() > kBegunEntries)
    absl::StrAppend(&where, ", after ", ScopeName(log.back()), " was opened");
  return absl::Status(broken.code(), absl::StrCat(where, ": ", broken.message()));
}

// The ranks may have gone apart before the collectives noticed; what they opened explains it better.
// Of any other failure some ranks may learn a step later than others.
bool Executor::MayHaveGoneApart(const absl::Status& broken) {
  return broken.code() == absl::StatusCode::kFailedPrecondition ||
         broken.code() == absl::StatusCode::kDeadlineExceeded;
}

// The failure of the engine. Nobody is to wait any longer for what this rank has to say to it.
absl::Status Executor::Withdraw() {
  absl::Status failed = StuckError();
  control_->Abort(failed);
  return failed;
}

}  // namespace ebb
