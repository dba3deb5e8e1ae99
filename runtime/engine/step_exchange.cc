// The exchange of all ranks' records on the reduce stream, around which StepOutcome does its part, and the
// norms that have to be taken anew before it.
#include "ebb/runtime/engine/executor.h"

namespace ebb {

// With updates off the step is over when Finish returns, and an optimizer of the trainer's is only called
// for what is applied.
bool Executor::FinishWaits() const {
  return own_optimizer_enqueues_ ||
         progress_.run->plan.decisions.timing == sharding::UpdateTiming::kOff;
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

}  // namespace ebb
