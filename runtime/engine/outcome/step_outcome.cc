#include "ebb/runtime/engine/outcome/step_outcome.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

StepOutcome::StepOutcome(const Config& config, StepErrors& errors, StepPeers& peers,
                         ControlBlock& control, StepConstants& constants, OutcomeMessages& messages,
                         const std::vector<int>& backwards, const VerdictRanks& ranks)
    : config_(config),
      errors_(errors),
      peers_(peers),
      control_(control),
      constants_(constants),
      messages_(messages),
      backwards_(backwards),
      ranks_(ranks),
      training_(config) {
  control_.loss_scale() = training_.loss_scale();
}

absl::Status StepOutcome::Located(const absl::Status& broken, std::span<const int64_t> log) const {
  if (broken.ok()) return broken;
  return messages_.Located(broken, peers_.WhereBroken(broken), log, finished_steps() + 1);
}

// The last steps and their updates may fail when the trainer asks no more.
StepOutcome::~StepOutcome() {
  const std::string& engine = messages_.engine();
  const std::string rank = messages_.RankName(messages_.rank());
  if (const absl::Status failed = errors_.UnreportedFailure(); !failed.ok())
    LogWarning(absl::StrCat(engine, " ", OfRank(rank, failed).message()));
  if (errors_.has_failed()) return;
  const bool failed = std::any_of(std::begin(slots_), std::end(slots_), [&](const Slot& slot) {
    return slot.state == State::kJudged && !slot.evaluation && slot.judged.failed &&
           slot.judged.cause > errors_.known_exchange();
  });
  if (failed || errors_.has_unreported())
    LogWarning(absl::StrCat(engine, " ", rank,
                            ": one of the last steps has failed, and Report was not called"));
}

// By the calling thread.

int StepOutcome::FreeSlot(bool evaluation) {
  Take(/*untaken_max=*/evaluation ? 0 : 1);
  return evaluation ? ControlBlock::kEvaluation : 1 - last_;
}

int StepOutcome::Begin(bool evaluation) {
  const int parity = FreeSlot(evaluation);
  outer_ = open_;
  Slot& slot = slots_[parity];
  slot.state = State::kBegun;
  slot.evaluation = evaluation;
  slot.updates_started = false;
  open_ = parity;
  for (double& sum : control_.sums(parity)) sum = 0;
  errors_.Open(evaluation ? StepErrors::kEvaluation : parity);
  return parity;
}

void StepOutcome::EndOpen() {
  open_ = std::exchange(outer_, std::nullopt);
  errors_.Close();
}

void StepOutcome::StartEarlyUpdate() {
  if (!errors_.blocked(*open_) && !errors_.has_failed()) slots_[*open_].updates_started = true;
}

bool StepOutcome::MayUpdate(int parity, bool early) const {
  if (errors_.has_failed()) return false;
  return !early || (!errors_.blocked(parity) && peers_.Broken().ok());
}

void StepOutcome::Close(const Closing& closing) {
  const int parity = *open_;
  Slot& slot = slots_[parity];
  slot.terms = closing.terms;
  slot.terms.exchange = errors_.NextExchange();
  slot.error = errors_.Peek();
  slot.log.assign(closing.log.begin(), closing.log.end());
  ExchangeRecord& record = control_.own_record(parity);
  const uint64_t rates = slot.evaluation ? 0 : constants_.rates().hash(parity);
  record = {.scopes_hash = closing.scopes_hash,
            .rates_hash = rates ^ std::bit_cast<uint64_t>(closing.terms.gradient_scale),
            .exchange = slot.terms.exchange,
            .known = errors_.known_exchange(),
            .adds_loss = closing.adds_loss,
            .updates_started = slot.updates_started,
            .returned = !slot.error.ok()};
  if (!slot.error.ok()) {
    record.SetError(slot.error);
  } else if (slot.evaluation) {
    record.SetSums(*closing.sums);
  } else {
    record.SetTrail(*closing.trail);
  }
  slot.state = State::kSealed;
}

absl::Status StepOutcome::Finish() {
  Slot& slot = slots_[*open_];
  // In no record, and the step may be applied: a collective behind the exchange that was not
  // enqueued.
  if (const absl::Status known = errors_.Peek(); slot.error.ok() && !known.ok()) {
    errors_.Fail(
        absl::Status(known.code(), absl::StrCat("the engine has failed: ", known.message())));
  }
  last_ = *open_;
  // A failure for good is not left open, as nothing waits long for it.
  if (slot.terms.waits || errors_.has_failed() || !peers_.Broken().ok()) Take();
  absl::Status reported = errors_.Report();
  EndOpen();
  return reported;
}

absl::StatusOr<Evaluation::Sums> StepOutcome::FinishEvaluation() {
  const int parity = *open_;
  Slot& slot = slots_[parity];
  peers_.AwaitConclusion(parity);
  slot.error = errors_.Peek();
  slot.state = State::kFree;
  if (const absl::Status agreed = ErrorOf(slot.Known(parity)); !agreed.ok())
    errors_.NoteJudged(agreed, slot.terms.exchange);
  const absl::Status reported = errors_.Report();
  EndOpen();
  if (!reported.ok()) return reported;
  return slot.sums;
}

absl::Status StepOutcome::ErrorOf(const Known& known) {
  if (errors_.has_failed()) {
    const absl::Status failure = errors_.failure();
    peers_.Abort(failure);
    peers_.Withdraw(failure);
    return failure;
  }
  absl::Status status = known.error;
  // The first thing that ranks did differently. OK if there is none, or if they can no longer tell
  // each other. `broken`: why they have to.
  const auto difference = [&](const absl::Status& broken) {
    const absl::StatusOr<std::vector<std::vector<int64_t>>> logs = peers_.Logs(known.log, broken);
    return logs.ok() ? messages_.DifferenceOfLogs(*logs) : absl::OkStatus();
  };
  if (known.ranks.engine_failed) {
    errors_.Fail(status.ok() ? known.ranks.error : status);
    return errors_.failure();
  }
  // A failure after the exchange of a step that was left open fails the next step.
  const bool stands = known.is_step && !known.waits && known.complete && !known.ranks.broken;
  absl::Status broken = stands ? peers_.DeviceFailure() : peers_.Broken();
  if (broken.ok() && known.ranks.broken) broken = known.ranks.error;
  if (!broken.ok()) {
    // A rank may be waiting in another communicator for this rank.
    peers_.Abort(broken);
    // The others know it too, or are told now.
    const bool is_difference = IsDifference(broken);
    if (is_difference) peers_.Withdraw(broken);
    // The ranks may have opened different scopes before the collectives noticed, and that explains
    // the failure better. Some ranks may learn of any other failure a step later than others.
    const bool may_have_gone_apart =
        !is_difference && (absl::IsFailedPrecondition(broken) || absl::IsDeadlineExceeded(broken));
    const absl::Status apart = may_have_gone_apart ? difference(broken) : absl::OkStatus();
    if (status.ok()) status = apart;
    if (status.ok()) {
      status = messages_.Located(broken, peers_.WhereBroken(broken), known.log, finished_ + 1);
    }
    errors_.Fail(
        absl::Status(status.code(), absl::StrCat("the engine has failed: ", status.message())));
    return errors_.failure();
  }
  if (status.ok()) status = known.ranks.error;
  if (status.ok() && known.ranks.other_scopes >= 0) {
    // The ranks come here at different times where the step was left open.
    status = !known.is_step || known.waits ? difference(absl::OkStatus()) : absl::OkStatus();
    // Logs are of the ranks that make calls together, and records of the verdict's.
    if (status.ok() && known.is_step)
      status = messages_.DifferenceOfTrails(control_.records(known.parity));
    if (status.ok()) status = messages_.OtherScopes(known.ranks);
  }
  if (status.ok() && known.ranks.other_rates >= 0) status = messages_.OtherRates(known.ranks);
  return status;
}

absl::Status StepOutcome::ErrorOfCall(std::span<const int64_t> log, const Verdict& ranks) {
  const absl::Status own = errors_.Report();
  const absl::Status agreed = ErrorOf({.error = own, .log = log, .ranks = ranks});
  return errors_.has_failed() ? errors_.Report() : agreed;
}

void StepOutcome::Drop() {
  Slot& slot = slots_[*open_];
  if (slot.updates_started && constants_.of(*open_, /*early=*/true).apply) {
    errors_.Fail(
        absl::AbortedError("the engine has failed: a step was dropped after its first updates had "
                           "started; reload the model, or begin such steps with hold_updates"));
  }
  slot.state = State::kFree;
  EndOpen();
}

void StepOutcome::Take(int untaken_max) {
  const int last = last_;
  if (untaken_max < 2 && slots_[1 - last].IsUntaken()) TakeOne(slots_[1 - last], 1 - last);
  if (untaken_max < 1 && slots_[last].IsUntaken()) TakeOne(slots_[last], last);
}

void StepOutcome::TakeOne(Slot& slot, int parity) {
  peers_.AwaitConclusion(parity);
  slot.state = State::kFree;
  const Judgement& judged = slot.judged;
  absl::Status status = ErrorOf(slot.Known(parity));
  if (!errors_.has_failed()) {
    if (judged.failed && judged.cause != slot.terms.exchange) {
      status = last_failure_;  // held back for an error of a step before it
    } else if (status.ok() && judged.failed) {
      status = messages_.Overflowed(slot.ranks);
    }
  }
  if (status.ok()) {
    report_ = judged.report;
    finished_ = judged.report.step;
    if (judged.report.applied || messages_.rank() != 0) return;
    const std::string message =
        messages_.Skipped(slot.ranks, judged.report, judged.next_loss_scale);
    // fp16 finds its scale by overflowing now and then; anything else deserves attention.
    return config_.compute == DType::kFloat16 && !judged.at_minimum ? LogInfo(message)
                                                                    : LogWarning(message);
  }
  if (slot.updates_started || slot.ranks.updates_started) {
    errors_.Fail(
        absl::InternalError(absl::StrCat("the engine has failed: parts of the step were updated "
                                         "before it went wrong; reload the model. ",
                                         status.message())));
    status = errors_.failure();
  }
  if (errors_.has_failed()) {
    // Ranks may wait in the next step for this one. No update begins after its failure was
    // returned.
    peers_.Abort(errors_.failure());
    peers_.AwaitUpdates();
  }
  report_ = last_failure_ = status;
  errors_.NoteJudged(status, judged.cause);
}

absl::StatusOr<StepReport> StepOutcome::Report() {
  Take();
  // An error in an open step is returned by its Finish.
  if (open_ && !errors_.has_unreported() && report_.ok()) return report_;
  EBB_RETURN_IF_ERROR(errors_.Report());
  return report_;
}

int64_t StepOutcome::finished_steps() const {
  int64_t steps = finished_;
  for (const int parity : {0, 1})
    if (open_ != parity && slots_[parity].IsUntaken() && slots_[parity].error.ok()) ++steps;
  return steps;
}

void StepOutcome::SetTrainingState(const TrainingState& state) {
  training_.Resume(state);
  finished_ = state.finished_steps;
  control_.loss_scale() = training_.loss_scale();
  report_ =
      absl::FailedPreconditionError("no step has finished since the training state was loaded");
  last_failure_ = absl::OkStatus();
}

// In the order of the reduce stream.

void StepOutcome::Prepare(int parity, std::optional<double> learning_rate) {
  constants_.Set(parity, /*early=*/true, training_.Early(learning_rate));
}

void StepOutcome::Seal(int parity) {
  Slot& slot = slots_[parity];
  ExchangeRecord& record = control_.own_record(parity);
  const std::span<const double> values = control_.sums(parity);
  // Tensor ranks compute the same losses.
  const bool counts = ranks_.Counts(Axis::kTensor);
  record.loss = values.front();
  record.loss_counts = counts;
  if (slot.evaluation && !record.failed) {
    Evaluation::Sums sums = counts ? record.Sums() : Evaluation::Sums();
    for (size_t i = 0; i < sums.size() && counts; ++i) sums[i].sum = values[i];
    record.SetSums(sums);
  }
  const std::span<const double> squares = control_.squares();  // frozen units have none
  const bool counts_slices = ranks_.Counts(Axis::kReplica);
  size_t compared = 0;
  for (size_t u = 0; u < squares.size() && !slot.evaluation; ++u) {
    const auto unit = static_cast<int32_t>(u);
    if (!std::isfinite(squares[u]) &&
        (record.non_finite_unit < 0 || IsEarlier(unit, record.non_finite_unit, backwards_)))
      record.non_finite_unit = unit;
    const bool is_compared = compared < ranks_.compared.size() && ranks_.compared[compared] == unit;
    if (is_compared) control_.own_compared(parity)[compared++] = squares[u];
    // A step is skipped for what is not finite, also in a replica.
    if ((counts_slices && (counts || !is_compared)) || !std::isfinite(squares[u]))
      record.squares += squares[u];
  }
  const absl::Status broken = peers_.Broken();
  record.broken = !broken.ok();
  if (errors_.has_failed()) {
    record.engine_failed = true;
    record.SetError(errors_.failure());
  } else if (!record.failed && record.broken) {
    record.SetError(broken);
  }
  // Updates of a step that was held back have run and written nothing.
  slot.terms.early_applied = slot.terms.early && constants_.of(parity, /*early=*/true).apply;
  record.updates_started = record.updates_started && slot.terms.early_applied;
  slot.updates_started = record.updates_started;
}

void StepOutcome::Conclude(int parity, const absl::Status& exchanged) {
  Slot& slot = slots_[parity];
  // A rank may have reported its failure and left since. Its report counts.
  const std::span<const ExchangeRecord> records = control_.records(parity);
  slot.complete = std::all_of(records.begin(), records.end(), [&](const ExchangeRecord& record) {
    return record.exchange == slot.terms.exchange;
  });
  if (exchanged.ok() || slot.complete) {
    slot.ranks = ebb::Conclude(
        records, [this](int rank) { return messages_.RankName(rank); }, backwards_);
    if (slot.ranks.error.ok() && slot.ranks.non_finite_rank < 0) {
      if (const auto difference = DifferenceOfLosses(records, ranks_))
        slot.ranks.error = messages_.LossesDiffer(*difference);
    }
    if (slot.evaluation && slot.ranks.error.ok()) slot.sums = SumsOf(records);
    if (!slot.evaluation && slot.ranks.error.ok() && slot.ranks.non_finite_rank < 0) {
      if (const auto difference =
              DifferenceOfReplicas(control_.compared(parity), ranks_, backwards_))
        slot.ranks.error = messages_.ReplicasDiffer(*difference);
    }
  } else {
    slot.ranks = {};
    slot.ranks.error = exchanged;
  }
  if (!slot.evaluation) {
    slot.judged = training_.Judge(slot.terms, slot.ranks);
    if (!slot.judged.scalars.apply) errors_.Block(parity);
    constants_.Set(parity, /*early=*/false, slot.judged.scalars);
    double& rate = slot.judged.report.learning_rate;
    rate = constants_.rates().learning_rate(parity, /*group=*/nullptr).value_or(rate);
    if (!slot.judged.failed && config_.compute == DType::kFloat16)
      control_.loss_scale() = slot.judged.next_loss_scale;
  }
  slot.state = State::kJudged;
}

}  // namespace ebb
