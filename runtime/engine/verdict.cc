// What all ranks conclude at the end of a step: the norm, whether anything overflowed, and whether
// anyone has an error. All of it in the order of the reduce stream, where the next step finds what
// follows from it: constants of updates, the loss scale, whether anything may be applied.
#include <algorithm>
#include <cmath>
#include <utility>

#include "ebb/runtime/engine/executor.h"

namespace ebb {

// On a GPU, where the host goes on and learns later what came of the step. With updates off the step
// is over when Finish returns, and an optimizer of the trainer's is only called for what is applied.
bool Executor::DefersVerdict() const {
  return device_.kind() != DeviceKind::kCpu && !progress_.evaluation && !own_optimizer_enqueues_ &&
         progress_.run->plan.decisions.timing != sharding::UpdateTiming::kOff;
}

void Executor::EnqueueExchange() {
  const int parity = progress_.parity;
  const size_t own = sizeof(ExchangeRecord), all = own * static_cast<size_t>(size_);
  StepVerdict& step = verdicts_[parity];
  step.open = !progress_.evaluation;
  step.deferred = DefersVerdict();
  step.evaluation = progress_.evaluation;
  step.exchange = ++exchanges_;
  step.divisor = progress_.divisor;
  step.error = UntoldError();
  step.log.assign(progress_.log.begin(), progress_.log.end());
  ExchangeRecord& record = control_block_->own_record(parity);
  NoteVerdict(VerdictTouch::kBeginRecord, parity);
  record = {.scopes_hash = progress_.hash,
            .exchange = step.exchange,
            .told = told_,
            .updates_started = progress_.updates_started,
            .returned = !step.error.ok()};
  if (!step.error.ok()) {
    record.SetError(step.error);
  } else if (step.evaluation) {
    record.SetSums(progress_.sums);
  } else {
    record.SetTrail(progress_.trail);
  }
  if (!progress_.evaluation) Compute(*reduce_, [this] { RefreshNorms(); });
  compute_.Record(*fence_);  // behind the last loss
  reduce_->Wait(*fence_);
  NoteVerdict(VerdictTouch::kCompleteRecord, parity);
  reduce_->Enqueue([this, parity] { CompleteRecord(parity); });
  std::byte* const records = storage_->ExchangeRecords();
  reduce_->Copy(records + all, &record, static_cast<int64_t>(own));
  exchange_span_ = {.send = records + all, .receive = records, .count = sharding::kExchangeBytes};
  Communicator& communicator = ExchangeCommunicator();
  Compute(*reduce_, [this] { exchange_moved_before_ = Moved(ExchangeCommunicator()); });
  StickCollective(communicator,
                  communicator.AllGather(*reduce_, {&exchange_span_, 1}, DType::kInt8));
  Compute(*reduce_, [this, parity, counts = !progress_.evaluation] {
    if (!counts) return;
    moved_bytes_[parity][static_cast<int>(sharding::OperationKind::kExchange)] +=
        Moved(ExchangeCommunicator()) - exchange_moved_before_;
  });
  reduce_->Copy(control_block_->records(parity).data(), records, static_cast<int64_t>(all));
  NoteVerdict(VerdictTouch::kConclude, parity);
  reduce_->Enqueue([this, parity] { ConcludeExchange(parity); });
  if (step.open) control_block_->CopyConstants(*reduce_, parity, /*early=*/false);
}

// Of shards that have changed since they were summed.
void Executor::RefreshNorms() {
  for (size_t u = 0; u < squares_stale_.size(); ++u) {
    if (!std::exchange(squares_stale_[u], uint8_t{0}) || !plan().decisions.trainable[u]) continue;
    const int unit = static_cast<int>(u);
    Stream& stream = SettledStream(unit);
    const absl::Status read =
        VisitGradient(unit, Access::kRead, [&](std::byte* shard) { Norm(stream, unit, shard); });
    if (!read.ok()) failures_.Fail(read);
  }
}

// Where the gradient of a unit is summed off the plan, as if by a task of the reduce stream. On a GPU
// that does not reach what lives in host memory: the calling thread does, once it is at rest.
Stream& Executor::SettledStream(int unit) {
  if (GradientOnDevice(unit) || reduce_->view().native == nullptr) return *reduce_;
  reduce_->WaitIdle();
  for (std::optional<Stream>* stream : {&download_, &host_sum_, &host_update_, &written_})
    (*stream)->WaitIdle();
  NoteSettled(unit);
  return *host_sum_;
}

// What only the stream knows: norms, and what failed on it.
void Executor::CompleteRecord(int parity) {
  StepVerdict& step = verdicts_[parity];
  ExchangeRecord& record = control_block_->own_record(parity);
  const std::span<const double> values = control_block_->sums(parity);
  record.loss = values.front();
  if (step.evaluation && record.failed == 0) {
    Evaluation::Sums sums = record.Sums();
    for (size_t i = 0; i < sums.size(); ++i) sums[i].sum = values[i];
    record.SetSums(sums);
  }
  for (size_t u = 0; u < model_.units.size() && !step.evaluation; ++u) {
    if (!plan().decisions.trainable[u]) continue;
    const double square = control_block_->square(static_cast<int>(u));
    if (!std::isfinite(square) && record.non_finite_unit < 0)
      record.non_finite_unit = static_cast<int32_t>(u);
    if (replica_ == 0) record.squares += square;  // the others have the same
  }
  if (failures_.has_failed()) {
    record.engine_failed = true;
    record.SetError(failures_.failure());
  } else if (absl::Status broken = CommunicationError(); record.failed == 0 && !broken.ok()) {
    record.SetError(broken);
  }
  // Those of a step that was held back have run and written nothing.
  record.updates_started = record.updates_started && early_scalars_[parity].apply;
  step.updates_started = record.updates_started;
}

void Executor::ConcludeExchange(int parity) {
  StepVerdict& step = verdicts_[parity];
  // A rank that told the others of its failure may have left since: what it told counts.
  const std::span<const ExchangeRecord> records = control_block_->records(parity);
  step.complete = std::all_of(records.begin(), records.end(), [&](const ExchangeRecord& record) {
    return record.exchange == step.exchange;
  });
  if (absl::Status broken = ExchangeCommunicator().status(); broken.ok() || step.complete) {
    step.ranks = Conclude(records);
    if (step.evaluation && step.ranks.error.ok()) step.sums = SumsOf(records);
  } else {
    step.ranks = {};
    step.ranks.error = broken;
  }
  if (!step.evaluation) JudgeStep(parity);
  // Here and not in a task of its own: the first update waits for all that comes before it, and a GPU's
  // stream stops for each.
  NoteIfBroken(sharding::OperationKind::kExchange);
}

// The same on every rank, as it follows from the records alone.
void Executor::JudgeStep(int parity) {
  StepVerdict& step = verdicts_[parity];
  const bool finite = std::isfinite(step.ranks.squares);
  const bool told = step.ranks.told >= standing_.cause;
  const bool held_back =
      standing_.cause > 0 && (!told || (step.early && !early_scalars_[parity].apply));
  step.failed = held_back || !step.ranks.error.ok() || step.ranks.scopes_differ ||
                (!finite && !config_.checks_overflow());
  step.cause = held_back ? standing_.cause : step.exchange;
  if (told || !held_back) standing_.cause = 0;
  if (step.failed && !held_back && step.deferred && !step.ranks.returned)
    standing_.cause = step.cause;
  if (step.failed || !finite) blocked_[parity] = true;
  if (step.failed) return SetScalars(parity, /*early=*/false, StepScalars());

  optim::LossScaler& scaler = standing_.scaler;
  const double norm = std::sqrt(step.ranks.squares) / scaler.scale();
  const StepScalars scalars = ScalarsFor(step, norm);
  SetScalars(parity, /*early=*/false, finite ? scalars : StepScalars());
  StepReport& report = step.report;
  report.step = ++standing_.finished;
  report.applied = finite;
  report.skipped_steps = standing_.skipped += finite ? 0 : 1;
  report.loss = step.ranks.loss / step.divisor;
  report.gradient_norm = norm;
  report.loss_scale = scaler.scale();
  report.learning_rate = scalars.rates.learning_rate;
  if (finite) ++standing_.applied;
  scaler.Update(!finite);
  step.next_loss_scale = scaler.scale();
  step.at_minimum = scaler.at_minimum();
  if (config_.compute == DType::kFloat16) control_block_->loss_scale() = scaler.scale();
}

// Gradients written between Reduce and Finish: norms anew, and at stage 0 whole again.
void Executor::RefreshWrittenGradients() {
  std::fill(squares_stale_.begin(), squares_stale_.end(), uint8_t{1});
  Runnable& run = *progress_.run;
  for (size_t index = 0; index < run.plan.operations.size(); ++index) {
    if (run.plan.operations[index].kind != sharding::OperationKind::kGatherGradient) continue;
    run.issued[index] = 0;
    Issue(static_cast<int>(index));
  }
}

}  // namespace ebb
