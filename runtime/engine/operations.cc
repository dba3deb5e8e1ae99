// The plan's operations as work on streams.
#include "ebb/optim/norm.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/pool.h"

namespace ebb {

using sharding::Dependency;
using sharding::Operation;
using sharding::OperationKind;
using sharding::StreamId;

Stream& Executor::StreamOf(StreamId id) {
  switch (id) {
    case StreamId::kCompute:
      return compute_;
    case StreamId::kGather:
      return *gather_;
    case StreamId::kReduce:
      return *reduce_;
    case StreamId::kUpdate:
      return *update_;
    case StreamId::kUpload:
      return *upload_;
    case StreamId::kDownload:
      return *download_;
    case StreamId::kHostSum:
      return *host_sum_;
    case StreamId::kHostUpdate:
      return *host_update_;
    case StreamId::kReadParameters:
      return *read_parameters_;
    case StreamId::kReadStates:
      return *read_states_;
    case StreamId::kWrite:
      return *write_;
    case StreamId::kCheck:
      return *check_;
  }
  return compute_;
}

// Where an operation's events are recorded. Transfers with swap files start on one stream and end on
// another, so that the next ones start while they are on their way; they end in their order.
Stream& Executor::EndStreamOf(StreamId id) {
  switch (id) {
    case StreamId::kReadParameters:
      return *parameters_read_;
    case StreamId::kReadStates:
      return *states_read_;
    case StreamId::kWrite:
      return *written_;
    default:
      return StreamOf(id);
  }
}

// Copies of masters are made where the reads that bring them end.
Stream& Executor::WorkStreamOf(const Operation& operation) {
  return operation.kind == OperationKind::kNarrow ? EndStreamOf(operation.stream)
                                                  : StreamOf(operation.stream);
}

Communicator& Executor::CommunicatorOf(OperationKind kind) {
  switch (kind) {
    case OperationKind::kGather:
    case OperationKind::kRefresh:
      return *gather_communicator_;
    case OperationKind::kGatherSecondary:
      return *secondary_communicator_;
    case OperationKind::kAllReduce:
      return *replicas_communicator_;
    case OperationKind::kExchange:
      return ExchangeCommunicator();
    default:
      return *reduce_communicator_;
  }
}

Event& Executor::EventOf(const Dependency& dependency) {
  switch (dependency.kind) {
    case Dependency::kOperation:
      return *progress_.run->EventOf(dependency.index);
    case Dependency::kUpdated:
      return updated_[dependency.index];
    case Dependency::kExchanged:
      return *exchanged_;
    case Dependency::kStored:
      return stored_[dependency.index];
    case Dependency::kSlotFree:
      return slot_free_[dependency.index];
  }
  return *exchanged_;
}

void Executor::WaitCompute(std::span<const Dependency> waits) {
  for (const Dependency& dependency : waits) compute_.Wait(EventOf(dependency));
}

void Executor::Issue(int index) {
  Runnable& run = *progress_.run;
  if (run.issued[index]) return;
  run.issued[index] = 1;
  const Operation& operation = run.plan.operations[index];
  if (operation.condition ==
      (carries_ ? sharding::Condition::kNotCarrying : sharding::Condition::kCarrying))
    return;
  if (operation.kind == OperationKind::kMark) return Enqueue(index);
  const ProfilerRanges::Range range = profiler_ranges_->Enqueues(operation);
  Enqueue(index);
}

void Executor::Enqueue(int index) {
  Runnable& run = *progress_.run;
  const Operation& operation = run.plan.operations[index];
  Stream& stream = WorkStreamOf(operation);
  for (const Dependency& dependency : operation.after) stream.Wait(EventOf(dependency));
  EnqueueWork(index);
  Stream& end = EndStreamOf(operation.stream);
  if (Event* const event = run.EventOf(index)) end.Record(*event);
  if (operation.updates >= 0) end.Record(updated_[operation.updates]);
  if (operation.stores >= 0) end.Record(stored_[operation.stores]);
  if (operation.kind == OperationKind::kUpdate &&
      operation.condition == sharding::Condition::kCarrying)
    RecordUpdatesDone(operation.stream, carried_parity_);
  for (int slot : operation.frees) end.Record(slot_free_[slot]);
  switch (operation.kind) {
    case OperationKind::kRefresh:
      for (const sharding::Part& part : operation.parts) stream.Record(updated_[part.unit]);
      break;
    case OperationKind::kExchange:
      stream.Record(*exchanged_);
      stream.Record(concluded_[progress_.parity]);
      break;
    default:
      break;
  }
}

void Executor::EnqueueWork(int index) {
  Runnable* const run = progress_.run;
  const Operation& operation = run->plan.operations[index];
  const bool carried = operation.condition == sharding::Condition::kCarrying;
  const StepTag step{.trace = progress_.trace,
                     .finished = outcome_->finished_steps(),
                     .parity = carried ? carried_parity_ : progress_.parity,
                     .counted = progress_.counted,
                     .counts = progress_.alive && !progress_.evaluation && run != drain_.get()};
  switch (operation.kind) {
    case OperationKind::kMark:
      return;
    case OperationKind::kRead:
    case OperationKind::kUpload:
    case OperationKind::kDownload:
    case OperationKind::kWrite:
      return EnqueueMoves(index, step);
    case OperationKind::kFillSecondary:
      return FillSecondary(index, step);
    case OperationKind::kGather:
    case OperationKind::kGatherSecondary:
    case OperationKind::kReduce:
    case OperationKind::kAllReduce:
    case OperationKind::kGatherGradient:
    case OperationKind::kRefresh:
      EnqueueCollective(index);
      return;
    case OperationKind::kExchange:
      TraceBegin(*reduce_, *run, index);
      EnqueueExchange();
      TraceEnd(*reduce_, *run, index, step);
      return;
    case OperationKind::kExchangeNorms:
      return EnqueueNormExchange(*run, index, step);
    case OperationKind::kUpdate:
      if (run->plan.decisions.timing == sharding::UpdateTiming::kEarly && !carried)
        outcome_->StartEarlyUpdate();
      break;
    default:
      break;
  }
  Stream& stream = WorkStreamOf(operation);
  TraceBegin(stream, *run, index);
  NoteWork(stream, *run, index, step);
  Compute(stream, [this, run, index, step] { RunOperation(*run, index, step); });
  TraceEnd(stream, *run, index, step);
}

void Executor::EnqueueCollective(int index) {
  Runnable* const run = progress_.run;
  const Operation& operation = run->plan.operations[index];
  const sharding::Decisions& decisions = run->plan.decisions;
  Stream& stream = StreamOf(operation.stream);
  Communicator& communicator = CommunicatorOf(operation.kind);
  const StepTag step{.trace = progress_.trace, .parity = progress_.parity};
  TraceBegin(stream, *run, index);
  Compute(stream, [this, run, index] { Began(*run, index); });
  absl::Status status;
  const float divide = static_cast<float>(1.0 / progress_.divisor);
  if (operation.kind == OperationKind::kReduce) {
    status = communicator.ReduceScatter(stream, run->spans[index], decisions.reduced(),
                                        decisions.replicas() > 1 ? 1.0f : divide);
  } else if (operation.kind == OperationKind::kAllReduce) {
    status = communicator.AllReduce(stream, run->spans[index], decisions.reduced(), ReduceOp::kSum,
                                    divide);
  } else {
    const DType dtype = operation.kind == OperationKind::kGatherGradient ? decisions.accumulation
                                                                         : decisions.compute;
    status = communicator.AllGather(stream, run->spans[index], dtype);
  }
  NoteCollective(communicator, std::move(status));
  Compute(stream, [this, run, index, step] { Ended(*run, index, step); });
  TraceEnd(stream, *run, index, step);
}

// What the gather before it has brought, of which this rank keeps a part.
void Executor::FillSecondary(int index, StepTag step) {
  Runnable& run = *progress_.run;
  const int64_t size = SizeOf(run.plan.decisions.compute);
  TraceBegin(*gather_, run, index);
  for (const CollectiveSpan& part : run.spans[index])
    gather_->Copy(part.receive, part.send, part.count * size);
  TraceEnd(*gather_, run, index, step);
}

// Of a device that runs nothing of the host's beside its operations: what it will have moved.
int64_t Executor::Moved(const Communicator& communicator) const {
  return kernels_->enqueues() ? communicator.bytes_enqueued() : communicator.bytes_moved();
}

void Executor::Began(Runnable& run, int index) {
  const Operation& operation = run.plan.operations[index];
  moved_before_[static_cast<int>(operation.stream)] = Moved(CommunicatorOf(operation.kind));
}

void Executor::Ended(Runnable& run, int index, StepTag step) {
  const Operation& operation = run.plan.operations[index];
  const int64_t moved =
      Moved(CommunicatorOf(operation.kind)) - moved_before_[static_cast<int>(operation.stream)];
  if (&run != walk_.get())
    moved_bytes_[step.parity][static_cast<int>(operation.kind)] += moved;  // a step's only
  NoteIfBroken(operation.kind, operation.parts);
}

void Executor::RunOperation(Runnable& run, int index, StepTag step) {
  const Operation& operation = run.plan.operations[index];
  Stream& stream = WorkStreamOf(operation);
  if (operation.kind == OperationKind::kCheck) swap_verifier_->FilesAreOurs();
  for (const sharding::Part& part : operation.parts) {
    switch (operation.kind) {
      case OperationKind::kCast:
        Cast(part.unit, run.plan.scopes[part.scope].visit, storage_->Staging(part.staged));
        break;
      case OperationKind::kRound:
        Round(part.unit, SummedSlice(run.plan, part), RoundedSlice(run.plan, part));
        break;
      case OperationKind::kAccumulate:
        Accumulate(stream, part.unit, ReducedSlice(run.plan, part), ShardOf(run.plan, part),
                   part.first, part.last);
        break;
      case OperationKind::kNorm:
        Norm(stream, part.unit, ShardOf(run.plan, part));
        break;
      case OperationKind::kParameterNorms:
        RunParameterNorms(run.plan.works[static_cast<size_t>(part.work)], step.parity, part.first,
                          stream);
        break;
      case OperationKind::kUpdate:
        RunUpdate(run.plan.works[static_cast<size_t>(part.work)], step.parity,
                  run.plan.decisions.timing == sharding::UpdateTiming::kEarly &&
                      operation.condition != sharding::Condition::kCarrying,
                  stream);
        break;
      case OperationKind::kNarrow:
        Narrow(run.plan.narrowings[static_cast<size_t>(part.work)]);
        break;
      default:
        break;
    }
  }
}

// The arithmetic of the reduce stream.

// What a reduction reads: the whole gradient as backward wrote it, or its cast in staging.
std::byte* Executor::ReduceSource(const sharding::Plan& plan, const sharding::Part& part) const {
  return plan.decisions.casts() ? storage_->Staging(part.staged)
                                : storage_->Gradient(plan.scopes[part.scope].visit);
}

std::byte* Executor::SummedSlice(const sharding::Plan& plan, const sharding::Part& part) const {
  const sharding::Decisions& decisions = plan.decisions;
  const bool is_shard = !decisions.accumulates[part.unit] && GradientOnDevice(part.unit);
  if (!decisions.rounds_slices() && is_shard) return storage_->GradientSlice(part.unit);
  return ReduceSource(plan, part) + SliceOffset(part.unit, decisions.reduced());
}

std::byte* Executor::ReducedSlice(const sharding::Plan& plan, const sharding::Part& part) const {
  if (part.landed >= 0) return storage_->At(plan.pools.landing.Plus(part.landed));
  return RoundedSlice(plan, part);
}

std::byte* Executor::RoundedSlice(const sharding::Plan& plan, const sharding::Part& part) const {
  const sharding::Decisions& decisions = plan.decisions;
  if (!decisions.rounds_slices()) return SummedSlice(plan, part);
  return decisions.accumulates[part.unit] || !GradientOnDevice(part.unit)
             ? storage_->Staging(part.rounded)
             : storage_->GradientSlice(part.unit);
}

int64_t Executor::SliceOffset(int unit, DType dtype) const {
  return shard_ * plan().layout.units[unit].trainable.shard * SizeOf(dtype);
}

// To the dtype that is sent. With replicas that is fp32, and holds what was rounded to the
// communication dtype, so that the sums are those of a world without them.
void Executor::Cast(int unit, int visit, std::byte* destination) {
  const sharding::Decisions& decisions = plan().decisions;
  const std::byte* const source = storage_->Gradient(visit);
  const int64_t elements = plan().layout.units[unit].trainable.elements;
  const DType gradient = decisions.gradient, communication = decisions.communication,
              reduced = decisions.reduced();
  if (gradient == communication || reduced == communication) {
    KernelsOf(*reduce_).Cast(*reduce_, source, gradient, destination, reduced, elements,
                             optim::Rounding::kNearest);
  } else {
    KernelsOf(*reduce_).CastVia(*reduce_, source, gradient, communication, destination, reduced,
                                elements);
  }
}

void Executor::Round(int unit, const std::byte* summed, std::byte* reduced) {
  const sharding::Decisions& decisions = plan().decisions;
  KernelsOf(*reduce_).Cast(*reduce_, summed, decisions.reduced(), reduced, decisions.communication,
                           plan().layout.units[unit].trainable.shard, optim::Rounding::kNearest);
}

std::byte* Executor::ShardOf(const sharding::Plan& plan, const sharding::Part& part) const {
  if (part.gradient_slot < 0) return storage_->GradientSlice(part.unit);
  return storage_->At(plan.pools.gradient_slots.Slot(part.gradient_slot));
}

void Executor::Accumulate(Stream& stream, int unit, const std::byte* reduced, std::byte* shard_data,
                          bool first, bool last) {
  const sharding::Decisions& decisions = plan().decisions;
  const optim::AccumulateArrays arrays{.source = reduced,
                                       .source_dtype = decisions.communication,
                                       .destination = shard_data,
                                       .destination_dtype = decisions.shard_dtype(unit),
                                       .count = plan().layout.units[unit].trainable.shard,
                                       .add = !first};
  if (last) {
    KernelsOf(stream).AccumulateAndSumSquares(stream, arrays, NormScratch(unit),
                                              &control_block_->square(unit));
  } else {
    KernelsOf(stream).Accumulate(stream, arrays);
  }
}

void Executor::Norm(Stream& stream, int unit, const std::byte* shard_data) {
  KernelsOf(stream).SumOfSquares(stream, shard_data, plan().decisions.shard_dtype(unit),
                                 plan().layout.units[unit].trainable.shard, NormScratch(unit),
                                 &control_block_->square(unit));
}

std::span<double> Executor::NormScratch(int unit) const {
  const Tier home = plan().pools.homes.units[static_cast<size_t>(unit)].gradient;
  return {storage_->NormScratch(home),
          static_cast<size_t>(optim::NormBlocks(plan().layout.units[unit].trainable.shard))};
}

}  // namespace ebb
