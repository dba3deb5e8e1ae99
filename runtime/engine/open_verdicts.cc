// The host's side of a step's verdict: taken by Finish on the CPU, on a GPU by whoever looks first,
// and by the step after the next, so that at most two are open. It is the same on all ranks, but the
// callers of some may hear of an error later than others; until then no step is applied (Standing).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/engine/watchdog.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// How long ranks that have waited out the time-out wait for each other to learn why.
constexpr double kDifferenceSecondsMin = 2, kDifferenceOfTimeout = 0.05;

}  // namespace

// Waits for those of all steps but the last `may_stay_open`. Their first error.
absl::Status Executor::TakeVerdicts(int may_stay_open) {
  const int last = finished_parity_;
  absl::Status first;
  if (verdicts_[1 - last].open && may_stay_open < 2) first = TakeVerdict(1 - last);
  if (verdicts_[last].open && may_stay_open < 1) {
    absl::Status status = TakeVerdict(last);
    if (first.ok()) first = std::move(status);
  }
  if (progress_.alive && !untold_.ok()) Stick(untold_);
  return first;
}

void Executor::AwaitConclusion(int parity) {
  concluded_[static_cast<size_t>(parity)].Wait();
  // A failed device is not waited for. It may still write the verdict.
  if (!device_.status().ok()) reduce_->WaitIdle();
}

absl::Status Executor::TakeVerdict(int parity) {
  StepVerdict& step = verdicts_[parity];
  AwaitConclusion(parity);
  step.open = false;
  absl::Status status = ReachVerdict(step);
  if (status.ok()) return status;
  if (!step.deferred) {
    // Blocked updates still in the queue must see that they are.
    update_->WaitIdle();
    if (host_update_) host_update_->WaitIdle();
  }
  if (step.updates_started || step.ranks.updates_started) {
    failures_.Fail(
        absl::InternalError(absl::StrCat("the engine has failed: parts of the step were updated "
                                         "before it went wrong; reload the model. ",
                                         status.message())));
    status = StuckError();
  }
  report_ = last_failure_ = status;
  if (step.cause > told_ && untold_.ok()) untold_ = status;
  return status;
}

absl::Status Executor::ReachVerdict(const StepVerdict& step) {
  absl::Status agreed = AgreedError(step);
  if (failures_.has_failed()) return agreed;
  // Held back for an error of a step before it.
  if (step.failed && step.cause != step.exchange) return last_failure_;
  EBB_RETURN_IF_ERROR(agreed);
  if (step.failed) {
    return absl::OutOfRangeError(
        absl::StrCat(NonFinite(step),
                     ", and overflow checks are off (ebb.check_overflow): nothing may be updated "
                     "with it; lower the learning rate, or turn the checks on to skip such steps"));
  }
  finished_steps_ = step.report.step;
  report_ = step.report;
  if (!step.report.applied && rank_ == 0) LogSkipped(step);
  return absl::OkStatus();
}

std::string Executor::NonFinite(const StepVerdict& step) const {
  return absl::StrCat("a non-finite gradient in unit '",
                      model_.units[step.ranks.non_finite_unit].name, "' of rank ",
                      step.ranks.non_finite_rank);
}

void Executor::LogSkipped(const StepVerdict& step) const {
  const std::string message = absl::StrCat(
      options_.name, ": step ", step.report.step, " skipped: ", NonFinite(step), "; ",
      step.report.skipped_steps, " skipped so far, loss scale now ", step.next_loss_scale);
  // fp16 finds its scale by overflowing now and then; anything else deserves attention.
  if (config_.compute == DType::kFloat16 && !step.at_minimum) {
    LogInfo(message);
  } else {
    LogWarning(message);
  }
}

// What a call is about to return: its own, or the error of a step that no call has returned yet.
absl::Status Executor::Told(absl::Status status) {
  if (!untold_.ok()) status = untold_;
  if (!status.ok()) {
    untold_ = absl::OkStatus();
    told_ = exchanges_;
  }
  return status;
}

// For calls that look at the state, or change it: errors come before what they left behind.
absl::Status Executor::SettleVerdicts() {
  TakeVerdicts().IgnoreError();
  return Told(StuckError());
}

// As if every step that is still open went well.
int64_t Executor::FinishedSteps() const {
  const int last = finished_parity_;
  const bool older = !progress_.alive && verdicts_[1 - last].open;
  return finished_steps_ + (verdicts_[last].open ? 1 : 0) + (older ? 1 : 0);
}

// What went wrong on any rank, after the exchange; the same step fails on all of them.
absl::Status Executor::AgreedError(const StepVerdict& step) {
  absl::Status status = step.error;
  if (failures_.has_failed()) {
    // The step's first updates may already have failed, after all ranks had agreed on it.
    if (!step.ranks.engine_failed) AbortStep(UntoldError());
    return Withdraw();
  }
  if (step.ranks.engine_failed) {
    failures_.Fail(status.ok() ? step.ranks.error : status);
    return StuckError();
  }
  // What broke after the exchange of a step that was left open fails the next one's.
  const bool stands = step.deferred && step.complete;
  if (absl::Status broken = stands ? device_.status() : CommunicationError(); !broken.ok()) {
    // A rank may be waiting in the other one for this rank.
    AbortStep(broken);
    const absl::Status difference =
        MayHaveGoneApart(broken) ? FindDifference(step.log, broken) : absl::OkStatus();
    if (status.ok()) status = difference.ok() ? Located(broken, step.log) : difference;
    failures_.Fail(
        absl::Status(status.code(), absl::StrCat("the engine has failed: ", status.message())));
    return StuckError();
  }
  if (status.ok()) status = step.ranks.error;
  if (status.ok() && step.ranks.scopes_differ) {
    // The ranks come here at different times where the step was left open.
    status = step.deferred ? DifferenceOfTrails(step) : FindDifference(step.log, absl::OkStatus());
    if (status.ok()) status = absl::FailedPreconditionError("ranks opened different scopes");
  }
  return status;
}

// Names the first thing that ranks did differently in this step. OK if there is none, or if they
// can no longer tell each other. `broken`: why they have to.
absl::Status Executor::FindDifference(std::span<const int64_t> log, const absl::Status& broken) {
  // Those that are at work have been woken and come as soon as what they compute has ended. Whoever
  // does not has stalled, or is in a call of another engine.
  std::optional<Watchdog> watchdog;
  if (absl::IsDeadlineExceeded(broken) && control_->status().ok()) {
    watchdog.emplace(
        *control_,
        std::max(kDifferenceSecondsMin, kDifferenceOfTimeout * config_.ebb.timeout_seconds),
        broken);
  }
  const absl::StatusOr<std::vector<std::vector<int64_t>>> logs = AllLists(Control(), log);
  if (!logs.ok()) return absl::OkStatus();
  // No rank goes on, and perhaps withdraws, before all have the logs.
  StickCollective(*control_, control_->Barrier(*reduce_));
  reduce_->WaitIdle();
  const std::vector<int64_t>& first = logs->front();
  const auto code = [](const std::vector<int64_t>& of, size_t index) {
    return index < of.size() ? static_cast<int>(of[index]) : ScopeTrail::kNothing;
  };
  for (size_t r = 1; r < logs->size(); ++r) {
    const std::vector<int64_t>& other = (*logs)[r];
    if (first == other) continue;
    if (absl::Status begun = BegunDifferently(first, other, r); !begun.ok()) return begun;
    size_t index = kBegunEntries;
    while (index < first.size() && index < other.size() && first[index] == other[index]) ++index;
    return OpenedDifferently(static_cast<int>(index - kBegunEntries), code(first, index),
                             code(other, index), r);
  }
  return absl::OkStatus();
}

// The same from the records, without another collective.
absl::Status Executor::DifferenceOfTrails(const StepVerdict& step) const {
  const std::span<const ExchangeRecord> records =
      control_block_->records(static_cast<int>(&step - verdicts_));
  const ScopeTrail first = records.front().Trail();
  for (size_t r = 1; r < records.size(); ++r) {
    const ScopeTrail other = records[r].Trail();
    if (absl::Status begun = BegunDifferently(first.begun, other.begun, r); !begun.ok())
      return begun;
    if (const std::optional<ScopeDifference> difference = FirstDifference(first, other))
      return OpenedDifferently(difference->number, difference->first, difference->other, r);
  }
  return absl::OkStatus();
}

// Of logs, or what trails have of them.
absl::Status Executor::BegunDifferently(std::span<const int64_t> first,
                                        std::span<const int64_t> other, size_t rank) const {
  size_t index = 0;
  while (index < kBegunEntries && index < first.size() && index < other.size() &&
         first[index] == other[index])
    ++index;
  if (index == kBegunEntries || index == first.size() || index == other.size())
    return absl::OkStatus();
  if (first[1] != other[1] && (IsMeeting(first) || IsMeeting(other))) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks do different things with the engine '", options_.name, "': rank 0 ",
                     Describe(first[1]), ", rank ", rank, " ", Describe(other[1])));
  }
  if (index > 0 && first[1] == static_cast<int64_t>(Meeting::kSetTrainingState)) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks set different training states of the engine '", options_.name,
                     "': rank ", rank, " another one than rank 0; all must set the same"));
  }
  if (index > 0 && first[1] == static_cast<int64_t>(Meeting::kAgree)) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks call Agree of the engine '", options_.name,
                     "' about different things: rank ", rank, " about another one than rank 0"));
  }
  if (index > 0 && IsMeeting(first)) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks copy parameters into the engine '", options_.name,
                     "' from different engines: rank ", rank, " from another one than rank 0"));
  }
  if (index == 1 && IsEvaluation(first) != IsEvaluation(other)) {
    const auto begun = [](bool evaluation) {
      return evaluation ? " began an evaluation" : " began a step";
    };
    return absl::FailedPreconditionError(
        absl::StrCat("ranks do different things with the engine '", options_.name, "': rank ", rank,
                     begun(IsEvaluation(other)), " where rank 0", begun(IsEvaluation(first))));
  }
  constexpr const char* kWhat[kBegunEntries] = {
      "are in different steps or evaluations (counted from the first, with every Suspend, Resume, "
      "SetTrainingState and CopyParametersFrom)",
      "began a step or evaluation with different micro_batches",
      "began a step with different gradient_divisor", "began a step with different learning_rate",
      "began a step with different hold_updates (1) or may_leave_out (2)"};
  const bool is_double = index == 2 || index == 3;
  const auto value = [&](int64_t code) {
    // An evaluation's are negative in a log.
    return is_double ? absl::StrCat(std::bit_cast<double>(code)) : absl::StrCat(std::abs(code));
  };
  return absl::FailedPreconditionError(absl::StrCat("ranks ", kWhat[index], ": ",
                                                    value(first[index]), " on rank 0, ",
                                                    value(other[index]), " on rank ", rank));
}

absl::Status Executor::OpenedDifferently(int number, int first, int other, size_t rank) const {
  const auto name = [this](int code) {
    return code == ScopeTrail::kNothing ? std::string("nothing more") : ScopeName(code);
  };
  return absl::FailedPreconditionError(
      absl::StrCat("ranks opened different scopes: as number ", number + 1,
                   " of the step rank 0 opened ", name(first), ", rank ", rank, " ", name(other),
                   "; every rank must open the same scopes in the same order"));
}

}  // namespace ebb
