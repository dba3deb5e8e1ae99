// The exchange of all ranks' records on the reduce stream, around which StepOutcome does its part, what has
// to be there before it (what Finish was given, norms to be taken anew), and collectives that fail.
#include "ebb/runtime/engine/executor.h"

namespace ebb {

// With updates off the step is over when Finish returns, and an optimizer of the trainer's is only called
// for what is applied.
bool Executor::FinishWaits() const {
  return own_optimizer_enqueues_ ||
         progress_.run->plan.decisions.timing == sharding::UpdateTiming::kOff;
}

// What Finish was given: the updates of the step have not been enqueued yet.
absl::Status Executor::TakeRates(const FinishOptions& options) {
  if (options.rates.empty() && options.gradient_scale == 1) return absl::OkStatus();
  if (progress_.run->plan.decisions.timing == sharding::UpdateTiming::kEarly) {
    return absl::FailedPreconditionError(
        "Finish was given rates or a gradient_scale, and updates are early: they had theirs at "
        "BeginStep; begin such steps with StepOptions::rates_at_finish, or set "
        "ebb.asynchronous_step to late");
  }
  const float scale = static_cast<float>(options.gradient_scale);
  if (!std::isnormal(scale) || scale < 0) {
    return absl::InvalidArgumentError(absl::StrCat("gradient_scale ", options.gradient_scale,
                                                   ": it must be positive, and an fp32 number"));
  }
  progress_.gradient_scale = options.gradient_scale;
  return step_constants_->rates().Give(progress_.parity, options.rates);
}

void Executor::EnqueueExchange() {
  const int parity = progress_.parity;
  const size_t own = sizeof(ExchangeRecord), all = own * static_cast<size_t>(size_);
  NoteVerdict(VerdictTouch::kBeginRecord, parity);
  outcome_->Close({.waits = FinishWaits(),
                   .early = !progress_.evaluation &&
                            progress_.run->plan.decisions.timing == sharding::UpdateTiming::kEarly,
                   .divisor = progress_.divisor,
                   .learning_rate = progress_.options.learning_rate,
                   .gradient_scale = progress_.gradient_scale,
                   .scopes_hash = progress_.hash ^ progress_.order.hash(),
                   .trail = &progress_.trail,
                   .sums = &progress_.sums,
                   .log = progress_.log});
  if (progress_.gradients_written) Compute(*reduce_, [this] { RefreshNorms(); });
  compute_.Record(*fence_);  // behind the last loss
  reduce_->Wait(*fence_);
  NoteVerdict(VerdictTouch::kCompleteRecord, parity);
  reduce_->Enqueue([this, parity] { outcome_->Seal(parity); });
  std::byte* const records = storage_->ExchangeRecords();
  reduce_->Copy(records + all, &control_block_->own_record(parity), static_cast<int64_t>(own));
  exchange_spans_[parity] = {
      .send = records + all, .receive = records, .count = sharding::kExchangeBytes};
  Communicator& communicator = ExchangeCommunicator();
  Compute(*reduce_, [this] { exchange_moved_before_ = Moved(ExchangeCommunicator()); });
  NoteCollective(communicator,
                 communicator.AllGather(*reduce_, {&exchange_spans_[parity], 1}, DType::kInt8));
  Compute(*reduce_, [this, parity, counts = !progress_.evaluation] {
    if (!counts) return;
    moved_bytes_[parity][static_cast<int>(sharding::OperationKind::kExchange)] +=
        Moved(ExchangeCommunicator()) - exchange_moved_before_;
  });
  reduce_->Copy(control_block_->records(parity).data(), records, static_cast<int64_t>(all));
  NoteVerdict(VerdictTouch::kConclude, parity);
  // One task: the first update waits for all that comes before it, and a GPU's stream stops for each.
  reduce_->Enqueue([this, parity] {
    outcome_->Conclude(parity, ExchangeCommunicator().status());
    NoteIfBroken(sharding::OperationKind::kExchange);
  });
  if (!progress_.evaluation) control_block_->CopyConstants(*reduce_, parity, /*early=*/false);
}

// Of shards that were written after they were summed.
void Executor::RefreshNorms() {
  for (int unit = 0; unit < static_cast<int>(model_.units.size()); ++unit) {
    if (!plan().decisions.trainable[static_cast<size_t>(unit)]) continue;
    Stream& stream = SettledStream(unit);
    const absl::Status read =
        VisitGradient(unit, Access::kRead, [&](std::byte* shard) { Norm(stream, unit, shard); });
    if (!read.ok()) errors_.Fail(read);
  }
}

// Where the norm of a unit's gradient is taken off the plan, as if by a task of the reduce stream. On a GPU
// that does not reach what lives in host memory: the calling thread does, once it is at rest.
Stream& Executor::SettledStream(int unit) {
  if (GradientOnDevice(unit) || reduce_->view().native == nullptr) return *reduce_;
  reduce_->WaitIdle();
  for (std::optional<Stream>* stream : {&download_, &host_sum_, &host_update_, &written_})
    (*stream)->WaitIdle();
  NoteSettled(unit);
  return *host_sum_;
}

// Gradients written between Reduce and Finish: at stage 0 they are made whole again.
void Executor::RefreshWrittenGradients() {
  Runnable& run = *progress_.run;
  for (size_t index = 0; index < run.plan.operations.size(); ++index) {
    if (run.plan.operations[index].kind != sharding::OperationKind::kGatherGradient) continue;
    run.issued[index] = 0;
    Issue(static_cast<int>(index));
  }
}

absl::Status Executor::Located(const absl::Status& broken) const {
  return messages_.Located(broken, peers_.WhereBroken(broken), progress_.log,
                           outcome_->finished_steps() + 1);
}

// A collective that one rank alone does not enqueue would pair its later ones with the wrong ones of the
// others.
void Executor::NoteCollective(Communicator& communicator, absl::Status status) {
  if (status.ok()) return;
  communicator.Abort(status);
  errors_.Note(std::move(status));
}

void Executor::NoteIfBroken(const Communicator& communicator, std::string_view operation,
                            std::span<const sharding::Part> parts) {
  peers_.NoteIfBroken(communicator, [&]() -> std::string {
    // NCCL's operations run long after the host was here, and its communicators fail together.
    if (world_.connected_by_nccl()) return "";
    std::string where(operation);
    const char* between = " of unit '";
    for (const sharding::Part& part : parts) {
      absl::StrAppend(&where, between, model_.units[part.unit].name, "'");
      between = ", '";
    }
    return where;
  });
}

}  // namespace ebb
