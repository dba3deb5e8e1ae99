#include "ebb/runtime/engine/issue/issuer.h"

#include <algorithm>
#include <cassert>
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
using sharding::Op;
using sharding::Operand;

namespace {

std::string Describe(const LinkedList& run, const Op& op) {
  std::string text(sharding::Name(op.role));
  const char* between = " of unit '";
  for (const sharding::Part& part : op.parts) {
    absl::StrAppend(&text, between, run.plan().unit_names[static_cast<size_t>(part.unit)], "'");
    between = ", '";
  }
  return text;
}

std::span<double> BlocksAt(std::byte* scratch, int64_t count) {
  return {reinterpret_cast<double*>(scratch), static_cast<size_t>(optim::NormBlocks(count))};
}

}  // namespace

void Issuer::Run(LinkedList& run, int begin, int end, const StepTag& step, MovedBytes* counted) {
  for (int index = begin; index < end; ++index) {
    const Op& op = run[index];
    if (op.code() == Code::kKernels) {
      if (op.scope >= 0) continue;
      core_.order.Await(run, index, step.parity);
      core_.order.Leave(run, index, step.parity);
    } else {
      Issue(run, index, step, counted);
    }
  }
}

// A copy of memory that the device has not locked waits inside the driver for all earlier work on
// the stream, including collectives of other ranks. So it is enqueued when the stream is idle.
void Issuer::StartNow(LinkedList& run, std::span<Event> over) {
  for (int index = 0; index < run.size(); ++index) {
    const Op& op = run[index];
    Stream& stream = At(op.starts);
    core_.order.AwaitUses(op);
    stream.WaitIdle();
    Work(run, index, StepTag(), stream);
    At(op.ends).Record(over[static_cast<size_t>(index)]);
  }
}

absl::Status Issuer::AwaitNow(LinkedList& run, std::span<Event> over) {
  absl::Status first;
  for (int index = 0; index < run.size(); ++index) {
    over[static_cast<size_t>(index)].Wait();
    first.Update(run.error(index));
    first.Update(At(run[index].ends).status());
  }
  return first;
}

void Issuer::StartOfSave(LinkedList& run, Stream* copies) {
  for (int index = 0; index < run.size(); ++index) {
    if (run[index].code() == Code::kTransfer) {
      StartTransfers(run, index, /*save=*/0);
    } else {
      Copy(run, index, /*parity=*/0, *copies);
    }
  }
}

absl::Status Issuer::AwaitOfSave(LinkedList& run, Stream* copies) {
  absl::Status first;
  for (int index = 0; index < run.size(); ++index) {
    if (run[index].code() == Code::kTransfer) EndTransfers(run, index, StepTag());
    first.Update(run.error(index));
  }
  if (copies != nullptr) {
    copies->WaitIdle();
    first.Update(copies->status());
  }
  return first;
}

void Issuer::Issue(LinkedList& run, int index, const StepTag& step, MovedBytes* counted) {
  const Op& op = run[index];
  core_.order.Await(run, index, step.parity);
  Stream &starts = At(op.starts), &ends = At(op.ends);
  core_.observers.Begin(run, index, step, starts);
  const Communicator* const along = op.code() == Code::kRedistribute && counted != nullptr
                                        ? &core_.communicators.Along(op.stream, op.axes())
                                        : nullptr;
  const int64_t before = along == nullptr ? 0 : along->bytes_enqueued();
  Work(run, index, step, starts);
  if (along != nullptr) counted->Add(op.role, along->bytes_enqueued() - before);
  if (counted != nullptr)
    for (const sharding::Move move : op.moves()) counted->Add(sharding::RowOf(move), move.bytes);
  core_.observers.End(run, index, step, ends);
  core_.order.Leave(run, index, step.parity);
}

void Issuer::Work(LinkedList& run, int index, const StepTag& step, Stream& stream) {
  const Op& op = run[index];
  switch (op.code()) {
    case Code::kKernels:
      return;
    case Code::kRedistribute:
      return Redistribute(run, index, step, stream);
    case Code::kCopy:
      return Copy(run, index, step.parity, stream);
    case Code::kTransfer:
      return Transfer(run, index, step, stream);
    case Code::kHost:
      assert(tasks_[static_cast<int>(op.role)] != nullptr);
      return tasks_[static_cast<int>(op.role)](run, index, step.parity, stream);
    case Code::kUpdate:
      if (!op.updates.empty() && op.updates.front().early) outcome_.StartEarlyUpdate();
      [[fallthrough]];
    case Code::kConvert:
    case Code::kAccumulate:
    case Code::kNorm:
      Enqueue(stream,
              [this, &run, index, step] { Calculate(run, index, step, At(run[index].starts)); });
  }
}

void Issuer::Transfer(LinkedList& run, int index, const StepTag& step, Stream& stream) {
  const uint32_t save = core_.storage.files().save();
  Tickets& started = started_[run[index].starts];
  const int64_t ticket = started.TakeTicket();
  stream.Enqueue([this, &run, &started, index, save, ticket] {
    StartTransfers(run, index, save);
    started.Pass(ticket);
  });
  At(run[index].ends).Enqueue([this, &run, &started, index, ticket, step] {
    started.Await(ticket);
    EndTransfers(run, index, step);
  });
}

void Issuer::Redistribute(LinkedList& run, int index, const StepTag& step, Stream& stream) {
  const Op& op = run[index];
  Communicator& along = core_.communicators.Along(op.stream, op.axes());
  const std::span<const CollectiveSpan> spans = run.spans(index);
  const DType dtype = op.operands.front().encoding.dtype;
  absl::Status status;
  switch (sharding::MovementOf(op.role)) {
    case sharding::Movement::kAllGather:
      status = along.AllGather(stream, spans, GatheredDType(op));
      break;
    case sharding::Movement::kReduceScatter:
      status = along.ReduceScatter(stream, spans, dtype, op.divides ? step.divide : 1.0f);
      break;
    case sharding::Movement::kAllToAllV:
      status = along.AllToAllV(stream, spans, dtype);
      break;
    case sharding::Movement::kAllReduce:
      status =
          along.AllReduce(stream, spans, dtype, ReduceOp::kSum, op.divides ? step.divide : 1.0f);
      break;
  }
  peers_.NoteCollective(along, std::move(status), core_.errors);
  Enqueue(stream, [this, &run, &along, index] {
    peers_.NoteIfBroken(along, [&] { return Describe(run, run[index]); });
  });
}

// For memory that the device could not lock, the driver may read before earlier work on the stream
// has ended, and may block the host while it holds locks of other ranks. So the host itself waits
// first for all issued work, on all ranks alike.
void Issuer::Copy(LinkedList& run, int index, int parity, Stream& stream) {
  const Op& op = run[index];
  for (size_t k = 0; k < op.operands.size(); k += 2) {
    const Operand &from = op.operands[k], &to = op.operands[k + 1];
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

std::span<std::byte> Issuer::MemoryOf(const LinkedList& run, int index, int operand,
                                      int parity) const {
  const Operand& of = run[index].operands[static_cast<size_t>(operand)];
  if (of.place.pool == StateClass::kControl) return control_.At(of.place.offset, parity);
  return {run.At(index, operand), static_cast<size_t>(of.bytes())};
}

ShardFile& Issuer::FileOf(const LinkedList& run, const sharding::Place& place) const {
  return run.list().of_save ? core_.storage.files().SavedFile(place)
                            : core_.storage.files().File(place);
}

void Issuer::StartTransfers(LinkedList& run, int index, uint32_t save) {
  if (core_.errors.has_failed()) return;
  const Op& op = run[index];
  run.started(index) = true;
  IoTransfer* const transfers = run.transfers(index);
  for (int i = 0; i < std::ssize(op.operands) / 2; ++i) {
    const Operand &from = op.operands[static_cast<size_t>(2 * i)],
                  &to = op.operands[static_cast<size_t>(2 * i) + 1];
    if (op.reads_file()) {
      FileOf(run, from.place)
          .StartRead(transfers[i], from.place.offset, run.At(index, 2 * i + 1), to.bytes());
      continue;
    }
    const std::byte* const data = run.At(index, 2 * i);
    if (run.list().of_state || SwapVerifier::SumsWhenMoved(to.place.pool)) {
      verifier_.NoteWrite(to.place, {data, static_cast<size_t>(from.bytes())});
    } else if (core_.storage.files().MoveTo(to.place, save)) {
      verifier_.NoteMove(to.place);
    }
    core_.storage.files().File(to.place).StartWrite(transfers[i], to.place.offset, data,
                                                    from.bytes());
  }
}

void Issuer::EndTransfers(LinkedList& run, int index, const StepTag& step) {
  if (!std::exchange(run.started(index), false)) {
    run.error(index) = core_.errors.failure();
    return;
  }
  const Op& op = run[index];
  const bool reads = op.reads_file();
  IoTransfer* const transfers = run.transfers(index);
  for (int i = 0; i < std::ssize(op.operands) / 2; ++i) {
    const Operand& file = op.operands[static_cast<size_t>(reads ? 2 * i : 2 * i + 1)];
    const StateClass state = file.place.pool;
    const absl::Status moved = FileOf(run, file.place).Wait(transfers[i]);
    if (run.list().of_state) {  // none of its reads is of whole extents
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
                     std::string(sharding::Name(op.role)), " of the ", std::string(Name(state)),
                     " of unit '", std::string(run.unit_name(index)), "': ", moved.message())));
  }
}

void Issuer::Calculate(const LinkedList& run, int index, const StepTag& step,
                       Stream& stream) const {
  const Op& op = run[index];
  if (op.code() == Code::kUpdate || op.role == sharding::Role::kParameterNorms)
    return updates_.Run(run, index, step, stream);
  const auto one = op.code() == Code::kAccumulate ? &Issuer::Accumulate
                   : op.code() == Code::kNorm     ? &Issuer::Norm
                                                  : &Issuer::Convert;
  for (int part = 0; part < std::ssize(op.parts); ++part) (this->*one)(run, index, part, stream);
}

void Issuer::Convert(const LinkedList& run, int index, int part, Stream& stream) const {
  const Op& op = run[index];
  const int first = 2 * part;
  const Operand &from = op.operands[static_cast<size_t>(first)],
                &to = op.operands[static_cast<size_t>(first) + 1];
  const std::byte* const source = run.At(index, first);
  std::byte* const destination = run.At(index, first + 1);
  const bool casts = op.role == sharding::Role::kCastMasters;
  if (casts) verifier_.VerifyMasters(op.updates[static_cast<size_t>(part)].sub_group, source);
  if (op.via) {
    core_.kernels.Of(stream).CastVia(stream, source, from.encoding.dtype, *op.via, destination,
                                     to.encoding.dtype, to.count);
  } else {
    core_.kernels.Of(stream).Cast(stream, source, from.encoding.dtype, destination,
                                  to.encoding.dtype, to.count,
                                  casts ? optim::Rounding::kParameter : optim::Rounding::kNearest);
  }
}

void Issuer::Accumulate(const LinkedList& run, int index, int part, Stream& stream) const {
  constexpr int kOperands = 4;  // slice, shard, square, scratch
  const int first = part * kOperands;
  const std::span<const Operand> operands =
      run[index].operands.subspan(static_cast<size_t>(first), kOperands);
  const optim::AccumulateArrays arrays{.source = run.At(index, first),
                                       .source_dtype = operands[0].encoding.dtype,
                                       .destination = run.At(index, first + 1),
                                       .destination_dtype = operands[1].encoding.dtype,
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

void Issuer::Norm(const LinkedList& run, int index, int part, Stream& stream) const {
  constexpr int kOperands = 3;  // shard, square, scratch
  const int first = part * kOperands;
  const Operand& shard = run[index].operands[static_cast<size_t>(first)];
  core_.kernels.Of(stream).SumOfSquares(
      stream, run.At(index, first), shard.encoding.dtype, shard.count,
      BlocksAt(run.At(index, first + 2), shard.count),
      &control_.square(run[index].parts[static_cast<size_t>(part)].unit));
}

}  // namespace ebb
