// Moves between tiers, as the plan has them; and the updates that one step leaves to the next.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/traffic.h"

namespace ebb {

using sharding::Move;
using sharding::Operation;
using sharding::OperationKind;

void Executor::CountMoves(const Operation& operation, StepTag step) {
  if (!step.counts) return;
  for (const Move& move : operation.moves)
    traffic_[step.counted].Add(sharding::RowOf(move), move.bytes);
}

// Copies between the device and host memory are the stream's. Of memory that the device could not lock,
// it promises neither to wait for the stream before it reads there nor not to wait on the host while
// it holds what others need: so the wait is ours, for what was issued before, by all ranks alike.
void Executor::EnqueueMoves(int index, StepTag step) {
  Runnable* const run = progress_.run;
  const Operation& operation = run->plan.operations[index];
  Stream& stream = StreamOf(operation.stream);
  if (operation.kind == OperationKind::kUpload || operation.kind == OperationKind::kDownload) {
    TraceBegin(stream, *run, index);
    const bool goes_up = operation.kind == OperationKind::kUpload;
    for (const Move& move : operation.moves) {
      if (storage_->CopiesHoldUpHost(goes_up ? move.from : move.to)) stream.WaitIdle();
      stream.Copy(storage_->At(move.to), storage_->At(move.from), move.bytes);
    }
    Compute(stream, [this, run, index, step] { CountMoves(run->plan.operations[index], step); });
    TraceEnd(stream, *run, index, step);
    return;
  }
  NoteTransfers(stream, operation);
  stream.Enqueue([this, run, index] { StartTransfers(*run, index); });
  Stream& end = EndStreamOf(operation.stream);
  stream.Record(*started_);
  end.Wait(*started_);
  NoteTransfers(end, operation);
  end.Enqueue([this, run, index, step] { EndTransfers(*run, index, step); });
}

void Executor::StartTransfers(Runnable& run, int index) {
  const Operation& operation = run.plan.operations[index];
  if (timeline_ != nullptr) run.begin_ns[index] = Timeline::NowNs();
  if (errors_.has_failed()) return;
  run.transfers_started[index] = 1;
  const bool reads = operation.kind == OperationKind::kRead;
  IoTransfer* const transfers = run.transfers[static_cast<size_t>(index)].get();
  for (size_t i = 0; i < operation.moves.size(); ++i) {
    const Move& move = operation.moves[i];
    const sharding::Place& disk = reads ? move.from : move.to;
    if (reads) {
      storage_->File(disk).StartRead(transfers[i], disk.offset, storage_->At(move.to), move.bytes);
    } else {
      if (SwapVerifier::SumsWhenMoved(move.state))
        swap_verifier_->NoteWrite(disk, {storage_->At(move.from), static_cast<size_t>(move.bytes)});
      storage_->File(disk).StartWrite(transfers[i], disk.offset, storage_->At(move.from),
                                      move.bytes);
    }
  }
}

void Executor::EndTransfers(Runnable& run, int index, StepTag step) {
  if (!std::exchange(run.transfers_started[index], uint8_t{0})) return;
  const Operation& operation = run.plan.operations[index];
  const bool reads = operation.kind == OperationKind::kRead;
  IoTransfer* const transfers = run.transfers[static_cast<size_t>(index)].get();
  for (size_t i = 0; i < operation.moves.size(); ++i) {
    const Move& move = operation.moves[i];
    const absl::Status moved = storage_->File(reads ? move.from : move.to).Wait(transfers[i]);
    if (moved.ok()) {
      if (reads && SwapVerifier::SumsWhenMoved(move.state))
        swap_verifier_->VerifyRead(move.from,
                                   {storage_->At(move.to), static_cast<size_t>(move.bytes)});
      continue;
    }
    errors_.Fail(absl::Status(
        moved.code(),
        absl::StrCat("the engine has failed: ", step.counts ? "in step " : "after step ",
                     step.finished + (step.counts ? 1 : 0), ", the ",
                     std::string(sharding::Name(operation.kind)), " of the ",
                     std::string(Name(move.state)), " of unit '",
                     run.plan.unit_names[operation.parts.front().unit], "': ", moved.message())));
  }
  CountMoves(operation, step);
  // Spans of one track do not overlap.
  if (timeline_ == nullptr) return;
  int64_t& begin = run.begin_ns[index];
  int64_t& traced = transfers_traced_ns_[static_cast<size_t>(operation.stream)];
  begin = std::max(begin, traced);
  Trace(run, index, step);
  traced = Timeline::NowNs();
}

// What a parameter is, from the master that was read for it and for its unit's update. Whether the
// master is what was written, the update finds out before it is written back; where parameters
// are summed, too, so is what stands for them.
void Executor::Narrow(const sharding::Narrowing& narrowing) {
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(narrowing.sub_group)];
  if (config_.ebb.verify_swap == VerifySwap::kAll) {
    swap_verifier_->VerifyRead(
        group.master, {storage_->At(narrowing.master),
                       static_cast<size_t>(group.count() * plan().decisions.master_size())});
  }
  Stream& stream = *parameters_read_;
  KernelsOf(stream).Cast(stream, storage_->At(narrowing.master), DType::kFloat32,
                         storage_->At(narrowing.parameter), config_.compute, group.count(),
                         optim::Rounding::kParameter);
}

// Runs the updates that the last step left to the next one, for the call that looks first.
void Executor::Drain() {
  if (!carries_) return;
  Runnable* const run = std::exchange(progress_.run, drain_.get());
  CollectSpans(drain_.get());
  std::fill(drain_->issued.begin(), drain_->issued.end(), uint8_t{0});
  for (size_t index = 0; index < drain_->plan.operations.size(); ++index)
    Issue(static_cast<int>(index));
  carries_ = false;
  progress_.run = run;
}

// The updates of the step before have their place ahead of the gathers of this one. What is left of
// them where the walk is over, is dropped or leaves the plan runs now: nothing is gathered from the
// slots any more that they pass through, but it may still be on its way.
void Executor::IssueCarriedLeft() {
  if (!carries_) return;
  const Runnable& run = *progress_.run;
  bool waited = false;
  for (int index : run.carried) {
    if (run.issued[static_cast<size_t>(index)]) continue;
    if (!std::exchange(waited, true)) {
      parameters_read_->WaitIdle();
      upload_->WaitIdle();
    }
    Issue(index);
  }
  carries_ = false;
}

// State is not to be looked at between the updates that a step carries.
absl::Status Executor::MayLook() const {
  if (!carries_ || !progress_.alive || progress_.evaluation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "state is asked for in a step that still has updates of the step before to do, as parameters "
      "on NVMe are updated just ahead of their use: ask between steps, or after Step::Reduce");
}

// Slow, and right whatever the streams were doing.
void Executor::AwaitOffloads() {
  for (std::optional<Stream>* stream : {&download_, &host_sum_, &parameters_read_, &written_}) {
    if (stream->has_value()) (*stream)->WaitIdle();
  }
}

// A unit's slice from where it lives into its slot, at once.
void Executor::FetchSlice(int unit) {
  for (const bool trainable : {true, false}) {
    const absl::Status verified =
        VerifyArray({.what = StateClass::kParameter, .unit = unit, .trainable = trainable});
    if (!verified.ok()) errors_.Fail(verified);
    const sharding::UnitLayout& layout = plan().layout.units[static_cast<size_t>(unit)];
    const int64_t shard = trainable ? layout.trainable.shard : layout.frozen.shard;
    std::byte* const slice = storage_->Slice(unit, trainable);
    const absl::Status fetched = VisitState(
        {.what = StateClass::kParameter, .unit = unit, .trainable = trainable}, 0, shard,
        Access::kRead, [&](std::byte* data, DType dtype, int64_t first, int64_t count) {
          upload_->WaitIdle();  // a copy of memory that is not locked would, in the driver
          upload_->Copy(slice + first * SizeOf(dtype), data, count * SizeOf(dtype));
          upload_->WaitIdle();
          return absl::OkStatus();
        });
    if (!fetched.ok()) errors_.Fail(fetched);
  }
}

// Until all updates of a unit are where they belong.
void Executor::AwaitState(int unit) {
  Drain();
  updated_[static_cast<size_t>(unit)].Wait();
  stored_[static_cast<size_t>(unit)].Wait();
}

// Until nothing reads state where it lives, between steps and evaluations. One that ended early has
// gathers of units under way that it never opened, and what brings their parameters.
void Executor::AwaitReaders() {
  for (std::optional<Stream>* stream : {&parameters_read_, &states_read_, &upload_, &gather_}) {
    if (stream->has_value()) (*stream)->WaitIdle();
  }
}

std::vector<TrafficRow> Executor::traffic() const {
  const int counted = finished_counted_;
  if (!has_finished_) return {};
  concluded_[static_cast<size_t>(outcome_->last_parity())]
      .Wait();  // what a step reads ends before that
  for (const std::vector<Event>* events : {&updated_, &stored_}) {
    for (const Event& event : *events) event.Wait();
  }
  return traffic_[counted].Rows(predicted_traffic_[counted]);
}

}  // namespace ebb
