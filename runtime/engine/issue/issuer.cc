#include "ebb/runtime/engine/issue/issuer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/norm.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/sharding/report/traffic.h"

namespace ebb {

using sharding::Code;
using sharding::Instruction;
using sharding::Operand;

namespace {

std::string Describe(const LinkedFragment& run, const Instruction& instruction) {
  std::string text(sharding::Name(instruction.role));
  const char* between = " of unit '";
  for (const sharding::Part& part : instruction.parts) {
    absl::StrAppend(&text, between, run.plan().unit_names[static_cast<size_t>(part.unit)], "'");
    between = ", '";
  }
  return text;
}

std::span<double> BlocksAt(std::byte* scratch, int64_t count) {
  return {reinterpret_cast<double*>(scratch), static_cast<size_t>(optim::NormBlocks(count))};
}

}  // namespace

void Issuer::Run(LinkedFragment& run, int begin, int end, const StepTag& step,
                 MovedBytes* counted) {
  for (int index = begin; index < end; ++index) {
    const Instruction& instruction = run[index];
    if (instruction.code == Code::kKernels) {
      if (instruction.scope >= 0) continue;
      core_.order.Await(run, index, step.parity);
      core_.order.Leave(run, index, step.parity);
    } else {
      Issue(run, index, step, counted);
    }
  }
}

// A copy of memory that the device has not locked waits inside the driver for all earlier work on
// the stream, including collectives of other ranks. So it is enqueued when the stream is idle.
void Issuer::StartNow(LinkedFragment& run, std::span<Event> over) {
  for (int index = 0; index < run.size(); ++index) {
    const Instruction& instruction = run[index];
    Stream& stream = At(instruction.starts);
    core_.order.AwaitUses(instruction);
    stream.WaitIdle();
    Work(run, index, StepTag(), stream);
    At(instruction.ends).Record(over[static_cast<size_t>(index)]);
  }
}

absl::Status Issuer::AwaitNow(LinkedFragment& run, std::span<Event> over) {
  absl::Status first;
  for (int index = 0; index < run.size(); ++index) {
    over[static_cast<size_t>(index)].Wait();
    first.Update(run.error(index));
    first.Update(At(run[index].ends).status());
  }
  return first;
}

void Issuer::StartOfSave(LinkedFragment& run, Stream* copies) {
  for (int index = 0; index < run.size(); ++index) {
    if (run[index].code == Code::kRead) {
      StartTransfers(run, index, /*save=*/0);
    } else {
      Copy(run, index, /*parity=*/0, *copies);
    }
  }
}

absl::Status Issuer::AwaitOfSave(LinkedFragment& run, Stream* copies) {
  absl::Status first;
  for (int index = 0; index < run.size(); ++index) {
    if (run[index].code == Code::kRead) EndTransfers(run, index, StepTag());
    first.Update(run.error(index));
  }
  if (copies != nullptr) {
    copies->WaitIdle();
    first.Update(copies->status());
  }
  return first;
}

void Issuer::Issue(LinkedFragment& run, int index, const StepTag& step, MovedBytes* counted) {
  const Instruction& instruction = run[index];
  core_.order.Await(run, index, step.parity);
  Stream &starts = At(instruction.starts), &ends = At(instruction.ends);
  core_.observers.Begin(run, index, step, starts);
  const bool collects = instruction.lane != sharding::Lane::kNone && counted != nullptr;
  const int64_t before = collects ? core_.communicators.Of(instruction.lane).bytes_enqueued() : 0;
  Work(run, index, step, starts);
  if (collects) {
    const Communicator& lane = core_.communicators.Of(instruction.lane);
    counted->Add(instruction.role, lane.bytes_enqueued() - before);
  }
  if (counted != nullptr && instruction.operation >= 0) {
    const sharding::Operation& operation =
        run.plan().operations[static_cast<size_t>(instruction.operation)];
    for (const sharding::Move move : operation.moves())
      counted->Add(sharding::RowOf(move), move.bytes);
  }
  core_.observers.End(run, index, step, ends);
  core_.order.Leave(run, index, step.parity);
}

void Issuer::Work(LinkedFragment& run, int index, const StepTag& step, Stream& stream) {
  const Instruction& instruction = run[index];
  switch (instruction.code) {
    case Code::kKernels:
      return;
    case Code::kAllGather:
    case Code::kReduceScatter:
    case Code::kAllReduce:
      return Collect(run, index, step, stream);
    case Code::kCopy:
      return Copy(run, index, step.parity, stream);
    case Code::kRead:
    case Code::kWrite: {
      const uint32_t save = core_.storage.files().save();
      Tickets& started = started_[instruction.starts];
      const int64_t ticket = started.TakeTicket();
      stream.Enqueue([this, &run, &started, index, save, ticket] {
        StartTransfers(run, index, save);
        started.Pass(ticket);
      });
      return At(instruction.ends).Enqueue([this, &run, &started, index, ticket, step] {
        started.Await(ticket);
        EndTransfers(run, index, step);
      });
    }
    case Code::kReadAsync:
      return stream.Enqueue([this, unit = instruction.parts.front().unit] { read_async_(unit); });
    case Code::kPrepare:
      return exchange_.Prepare(step.parity, stream);
    case Code::kSeal:
      return exchange_.Seal(run, index, step.parity, stream);
    case Code::kConclude:
      return exchange_.Conclude(step.parity, stream);
    case Code::kSealNorms:
      return exchange_.SealNorms(run, index, step.parity, stream);
    case Code::kConcludeNorms:
      return exchange_.ConcludeNorms(step.parity, stream);
    case Code::kUpdate:
      if (instruction.updates.front().early) outcome_.StartEarlyUpdate();
      [[fallthrough]];
    default:
      Enqueue(stream,
              [this, &run, index, step] { Calculate(run, index, step, At(run[index].starts)); });
  }
}

void Issuer::Collect(LinkedFragment& run, int index, const StepTag& step, Stream& stream) {
  const Instruction& instruction = run[index];
  Communicator& lane = core_.communicators.Of(instruction.lane);
  const std::span<const CollectiveSpan> spans = run.spans(index);
  const DType dtype = instruction.operands.front().dtype;
  absl::Status status;
  switch (instruction.code) {
    case Code::kReduceScatter:
      status = lane.ReduceScatter(stream, spans, dtype, instruction.divides ? step.divide : 1.0f);
      break;
    case Code::kAllReduce:
      status = lane.AllReduce(stream, spans, dtype, ReduceOp::kSum, step.divide);
      break;
    default:
      status = lane.AllGather(stream, spans, GatheredDType(instruction));
  }
  peers_.NoteCollective(lane, std::move(status), core_.errors);
  Enqueue(stream, [this, &run, index] {
    const Instruction& of = run[index];
    peers_.NoteIfBroken(core_.communicators.Of(of.lane), [&] { return Describe(run, of); });
  });
}

// For memory that the device could not lock, the driver may read before earlier work on the stream
// has ended, and may block the host while it holds locks of other ranks. So the host itself waits
// first for all issued work, on all ranks alike.
void Issuer::Copy(LinkedFragment& run, int index, int parity, Stream& stream) {
  const Instruction& instruction = run[index];
  for (size_t k = 0; k < instruction.operands.size(); k += 2) {
    const Operand &from = instruction.operands[k], &to = instruction.operands[k + 1];
    for (const Operand* end : {&from, &to}) {
      if (end->place.tier == Tier::kCpu && end->place.pool != StateClass::kControl &&
          core_.storage.host().CopiesHoldUpHost(end->place.pool))
        stream.WaitIdle();
    }
    const int operand = static_cast<int>(k);
    const std::span<std::byte> source = MemoryOf(run, index, operand, parity),
                               destination = MemoryOf(run, index, operand + 1, parity);
    // On the CPU constants are where updates read them.
    if (destination.data() == source.data()) continue;
    stream.Copy(destination.data(), source.data(),
                static_cast<int64_t>(std::min(source.size(), destination.size())));
  }
}

std::span<std::byte> Issuer::MemoryOf(const LinkedFragment& run, int index, int operand,
                                      int parity) const {
  const Operand& of = run[index].operands[static_cast<size_t>(operand)];
  if (of.place.pool == StateClass::kControl) return control_.At(of.place.offset, parity);
  return {run.At(index, operand), static_cast<size_t>(of.bytes())};
}

ShardFile& Issuer::FileOf(const LinkedFragment& run, const sharding::Place& place) const {
  return run.fragment().of_save ? core_.storage.files().SavedFile(place)
                                : core_.storage.files().File(place);
}

void Issuer::StartTransfers(LinkedFragment& run, int index, uint32_t save) {
  if (core_.errors.has_failed()) return;
  const Instruction& instruction = run[index];
  run.started(index) = true;
  IoTransfer* const transfers = run.transfers(index);
  for (int i = 0; i < std::ssize(instruction.operands) / 2; ++i) {
    const Operand &from = instruction.operands[static_cast<size_t>(2 * i)],
                  &to = instruction.operands[static_cast<size_t>(2 * i) + 1];
    if (instruction.code == Code::kRead) {
      FileOf(run, from.place)
          .StartRead(transfers[i], from.place.offset, run.At(index, 2 * i + 1), to.bytes());
      continue;
    }
    const std::byte* const data = run.At(index, 2 * i);
    if (run.fragment().of_state || SwapVerifier::SumsWhenMoved(to.place.pool)) {
      verifier_.NoteWrite(to.place, {data, static_cast<size_t>(from.bytes())});
    } else if (core_.storage.files().MoveTo(to.place, save)) {
      verifier_.NoteMove(to.place);
    }
    core_.storage.files().File(to.place).StartWrite(transfers[i], to.place.offset, data,
                                                    from.bytes());
  }
}

void Issuer::EndTransfers(LinkedFragment& run, int index, const StepTag& step) {
  if (!std::exchange(run.started(index), false)) {
    run.error(index) = core_.errors.failure();
    return;
  }
  const Instruction& instruction = run[index];
  const bool reads = instruction.code == Code::kRead;
  IoTransfer* const transfers = run.transfers(index);
  for (int i = 0; i < std::ssize(instruction.operands) / 2; ++i) {
    const Operand& file = instruction.operands[static_cast<size_t>(reads ? 2 * i : 2 * i + 1)];
    const StateClass state = file.place.pool;
    const absl::Status moved = FileOf(run, file.place).Wait(transfers[i]);
    if (run.fragment().of_state) {  // none of its reads is of whole extents
      run.error(index).Update(moved);
      if (!moved.ok() && !reads) verifier_.Forget(file.place, file.bytes());
      continue;
    }
    if (moved.ok()) {
      if (reads && SwapVerifier::SumsWhenMoved(state)) {
        verifier_.VerifyRead(file.place,
                             {run.At(index, 2 * i + 1), static_cast<size_t>(file.bytes())});
      }
      continue;
    }
    core_.errors.Fail(absl::Status(
        moved.code(),
        absl::StrCat("the engine has failed: ", step.counts ? "in step " : "after step ",
                     step.finished + (step.counts ? 1 : 0), ", the ",
                     std::string(sharding::Name(instruction.role)), " of the ",
                     std::string(Name(state)), " of unit '", std::string(run.unit_name(index)),
                     "': ", moved.message())));
  }
}

void Issuer::Calculate(const LinkedFragment& run, int index, const StepTag& step,
                       Stream& stream) const {
  const Instruction& instruction = run[index];
  switch (instruction.code) {
    case Code::kUpdate:
    case Code::kParameterNorms:
      return updates_.Run(run, index, step, stream);
    default:
      break;
  }
  const auto one = instruction.code == Code::kAccumulate ? &Issuer::Accumulate
                   : instruction.code == Code::kNorm     ? &Issuer::Norm
                                                         : &Issuer::Cast;
  for (int part = 0; part < std::ssize(instruction.parts); ++part)
    (this->*one)(run, index, part, stream);
}

void Issuer::Cast(const LinkedFragment& run, int index, int part, Stream& stream) const {
  const Instruction& instruction = run[index];
  const int first = 2 * part;
  const Operand &from = instruction.operands[static_cast<size_t>(first)],
                &to = instruction.operands[static_cast<size_t>(first) + 1];
  const std::byte* const source = run.At(index, first);
  std::byte* const destination = run.At(index, first + 1);
  const bool casts = instruction.code == Code::kCastMasters;
  if (casts)
    verifier_.VerifyMasters(instruction.updates[static_cast<size_t>(part)].sub_group, source);
  if (instruction.via) {
    core_.kernels.Of(stream).CastVia(stream, source, from.dtype, *instruction.via, destination,
                                     to.dtype, to.count);
  } else {
    core_.kernels.Of(stream).Cast(stream, source, from.dtype, destination, to.dtype, to.count,
                                  casts ? optim::Rounding::kParameter : optim::Rounding::kNearest);
  }
}

void Issuer::Accumulate(const LinkedFragment& run, int index, int part, Stream& stream) const {
  constexpr int kOperands = 4;  // slice, shard, square, scratch
  const int first = part * kOperands;
  const std::span<const Operand> operands =
      run[index].operands.subspan(static_cast<size_t>(first), kOperands);
  const optim::AccumulateArrays arrays{.source = run.At(index, first),
                                       .source_dtype = operands[0].dtype,
                                       .destination = run.At(index, first + 1),
                                       .destination_dtype = operands[1].dtype,
                                       .count = operands[1].count,
                                       .add = sharding::Reads(operands[1].access)};
  if (operands[2].access == sharding::Access::kNone) {
    core_.kernels.Of(stream).Accumulate(stream, arrays);
  } else {
    core_.kernels.Of(stream).AccumulateAndSumSquares(
        stream, arrays, BlocksAt(run.At(index, first + 3), operands[1].count),
        &control_.square(run[index].parts[static_cast<size_t>(part)].unit));
  }
}

void Issuer::Norm(const LinkedFragment& run, int index, int part, Stream& stream) const {
  constexpr int kOperands = 3;  // shard, square, scratch
  const int first = part * kOperands;
  const Operand& shard = run[index].operands[static_cast<size_t>(first)];
  core_.kernels.Of(stream).SumOfSquares(
      stream, run.At(index, first), shard.dtype, shard.count,
      BlocksAt(run.At(index, first + 2), shard.count),
      &control_.square(run[index].parts[static_cast<size_t>(part)].unit));
}

}  // namespace ebb
