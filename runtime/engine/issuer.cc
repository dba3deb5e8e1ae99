#include "ebb/runtime/engine/issuer.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/sharding/traffic.h"

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

}  // namespace

void Issuer::Await(LinkedFragment& run, int index, const StepTag& step) {
  const Instruction& instruction = run[index];
  Stream& stream = At(instruction.starts);
  const int parity = step.parity % 2;  // an evaluation has nothing by parity
  for (int wait : instruction.waits) {
    const int event = run.event(wait, parity);
    stream.Wait(*events_[static_cast<size_t>(event)]);
    frontier_.Follow(instruction.starts, event);
  }
  frontier_.Enter(instruction.starts, instruction.enters, parity,
                  [&](int event) { stream.Wait(*events_[static_cast<size_t>(event)]); });
}

void Issuer::Leave(LinkedFragment& run, int index, const StepTag& step) {
  const Instruction& instruction = run[index];
  const int parity = step.parity % 2;
  const int event = run.event(index, parity);
  if (event >= 0) At(instruction.ends).Record(*events_[static_cast<size_t>(event)]);
  frontier_.Issue(instruction.starts, instruction.ends, event);
  if (event >= 0) frontier_.Leave(instruction.leaves, parity, event);
}

void Issuer::Run(LinkedFragment& run, int begin, int end, const StepTag& step,
                 MovedBytes* counted) {
  for (int index = begin; index < end; ++index) {
    const Instruction& instruction = run[index];
    if (instruction.code == Code::kKernels) {
      if (instruction.scope >= 0) continue;
      Await(run, index, step);
      Leave(run, index, step);
    } else {
      Issue(run, index, step, counted);
    }
  }
}

void Issuer::StartKernels(LinkedFragment& run, int index, const StepTag& step) {
  Await(run, index, step);
}

void Issuer::EndKernels(LinkedFragment& run, int index, const StepTag& step) {
  Leave(run, index, step);
}

// A copy of memory that the device has not locked waits inside the driver for all that is before it on the stream,
// other ranks' collectives too: so it is enqueued when nothing is.
void Issuer::StartNow(LinkedFragment& run, std::span<Event> over) {
  std::vector<sharding::CellRange> ranges;
  std::vector<sharding::CellUse> uses;
  for (int index = 0; index < run.size(); ++index) {
    const Instruction& instruction = run[index];
    uses.clear();
    for (const Operand& operand : instruction.operands) {
      ranges.clear();
      cells_.Find(operand, ranges);
      for (const auto& [first, last] : ranges) {
        for (int cell = first; cell < last; ++cell)
          uses.push_back({.cell = cell, .writes = sharding::Writes(operand.access)});
      }
    }
    Stream& stream = At(instruction.starts);
    frontier_.Enter(instruction.starts, uses, /*parity=*/0,
                    [&](int event) { stream.Wait(*events_[static_cast<size_t>(event)]); });
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

absl::Status Issuer::MakeFence(const Device& device) {
  while (fence_.size() < sharding::kLines) {
    EBB_ASSIGN_OR_RETURN(Event made, NewAwaitedEvent(device));
    fence_.push_back(std::move(made));
  }
  for (size_t line = 0; line < sharding::kLines; ++line) {
    floor_.push_back(frontier_.AddEvent(static_cast<sharding::Line>(line)));
    events_.push_back(&fence_[line]);
  }
  return absl::OkStatus();
}

void Issuer::Fence() {
  EndEarly();
  for (size_t line = 0; line < sharding::kLines; ++line) {
    if (with_.streams[line] == nullptr) continue;
    for (int event : frontier_.floor()) {
      const auto number = static_cast<size_t>(event);
      if (events_[number] != &fence_[line]) with_.streams[line]->Wait(*events_[number]);
      frontier_.Follow(static_cast<sharding::Line>(line), event);
    }
  }
}

void Issuer::EndEarly() {
  std::vector<int> floor;
  for (size_t line = 0; line < sharding::kLines; ++line) {
    if (with_.streams[line] == nullptr) continue;
    with_.streams[line]->Record(fence_[line]);
    frontier_.Issue(static_cast<sharding::Line>(line), static_cast<sharding::Line>(line),
                    floor_[line]);
    floor.push_back(floor_[line]);
  }
  frontier_.SetFloor(std::move(floor));
}

void Issuer::WaitIdle() {
  WaitForSteps();
  if (Stream* const reads = with_.streams[sharding::kAsyncReads]; reads != nullptr)
    reads->WaitIdle();
  frontier_.Clear();
}

// Where transfers start before where they end. The frontier is kept: updates to come wait for what is being read.
void Issuer::WaitForSteps() {
  for (size_t line = 0; line < sharding::kLines; ++line) {
    if (with_.streams[line] != nullptr && line != sharding::kAsyncReads)
      with_.streams[line]->WaitIdle();
  }
}

void Issuer::AwaitParity(int parity) {
  for (int event : frontier_.floor()) events_[static_cast<size_t>(event)]->Wait();
  for (int64_t pair = control_.sums(); pair < control_.of_walks(); pair += 2) {
    frontier_.ForEachUse(static_cast<int>(pair) + parity,
                         [this](int event) { events_[static_cast<size_t>(event)]->Wait(); });
  }
}

void Issuer::AwaitScale() {
  const sharding::CellUse use{.cell = static_cast<int>(control_.scale)};
  constexpr sharding::Line kCompute = sharding::LineOf(sharding::StreamId::kCompute);
  frontier_.Enter(kCompute, {&use, 1}, /*parity=*/0,
                  [this](int event) { At(kCompute).Wait(*events_[static_cast<size_t>(event)]); });
}

void Issuer::Issue(LinkedFragment& run, int index, const StepTag& step, MovedBytes* counted) {
  const Instruction& instruction = run[index];
  Await(run, index, step);
  Stream &starts = At(instruction.starts), &ends = At(instruction.ends);
  for (IssueObserver* observer : observers_) observer->Begin(run, index, step, starts);
  const bool collects = instruction.lane != sharding::Lane::kNone && counted != nullptr;
  const int64_t before =
      collects ? (*with_.lanes[static_cast<size_t>(instruction.lane)])->bytes_enqueued() : 0;
  Work(run, index, step, starts);
  if (collects) {
    const Communicator& lane = **with_.lanes[static_cast<size_t>(instruction.lane)];
    counted->Add(instruction.role, lane.bytes_enqueued() - before);
  }
  if (counted != nullptr && instruction.operation >= 0) {
    const sharding::Operation& operation =
        run.plan().operations[static_cast<size_t>(instruction.operation)];
    for (const sharding::Move& move : operation.moves)
      counted->Add(sharding::RowOf(move), move.bytes);
  }
  for (IssueObserver* observer : observers_) observer->End(run, index, step, ends);
  if (instruction.code == Code::kExchange) with_.exchange->RecordConclusion(step.parity);
  Leave(run, index, step);
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
      return Copy(run, index, stream);
    case Code::kRead:
    case Code::kWrite: {
      const uint32_t save =
          with_.storage->second_places() != nullptr ? with_.storage->second_places()->save() : 0;
      stream.Enqueue([this, &run, index, save] { StartTransfers(run, index, save); });
      Stream& end = At(instruction.ends);
      Event& started = *with_.started;
      stream.Record(started);
      end.Wait(started);
      return end.Enqueue([this, &run, index, step] { EndTransfers(run, index, step); });
    }
    case Code::kReadAsync:
      return stream.Enqueue([this, unit = instruction.parts.front().unit] { read_async_(unit); });
    case Code::kPrepare:
      return with_.exchange->Prepare(step.parity);
    case Code::kExchange:
      return with_.exchange->Exchange(step.parity);
    case Code::kExchangeNorms:
      return with_.exchange->ExchangeNorms(step.parity);
    case Code::kUpdate:
      if (instruction.updates.front().early) with_.outcome->StartEarlyUpdate();
      [[fallthrough]];
    default:
      with_.arithmetic->Enqueue(stream, [this, &run, index, step] {
        with_.arithmetic->Run(run, index, step, At(run[index].starts));
      });
  }
}

void Issuer::Collect(LinkedFragment& run, int index, const StepTag& step, Stream& stream) {
  const Instruction& instruction = run[index];
  Communicator& lane = **with_.lanes[static_cast<size_t>(instruction.lane)];
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
      status = lane.AllGather(stream, spans, dtype);
  }
  with_.peers->NoteCollective(lane, std::move(status), *with_.errors);
  with_.arithmetic->Enqueue(stream, [this, &run, index] {
    const Instruction& of = run[index];
    with_.peers->NoteIfBroken(**with_.lanes[static_cast<size_t>(of.lane)],
                              [&] { return Describe(run, of); });
  });
}

// Of memory that the device could not lock, it promises neither to wait for the stream before it reads there nor
// not to wait on the host while it holds what others need: so the wait is ours, for what was issued before, by all
// ranks alike.
void Issuer::Copy(LinkedFragment& run, int index, Stream& stream) {
  const Instruction& instruction = run[index];
  for (size_t k = 0; k < instruction.operands.size(); k += 2) {
    const Operand &from = instruction.operands[k], &to = instruction.operands[k + 1];
    for (const Operand* end : {&from, &to}) {
      if (end->place.tier == Tier::kCpu && with_.storage->CopiesHoldUpHost(end->place))
        stream.WaitIdle();
    }
    const int operand = static_cast<int>(k);
    stream.Copy(run.At(index, operand + 1), run.At(index, operand), from.bytes());
  }
}

void Issuer::StartTransfers(LinkedFragment& run, int index, uint32_t save) {
  if (with_.errors->has_failed()) return;
  const Instruction& instruction = run[index];
  run.started(index) = 1;
  IoTransfer* const transfers = run.transfers(index);
  for (int i = 0; i < std::ssize(instruction.operands) / 2; ++i) {
    const Operand &from = instruction.operands[static_cast<size_t>(2 * i)],
                  &to = instruction.operands[static_cast<size_t>(2 * i) + 1];
    if (instruction.code == Code::kRead) {
      with_.storage->File(from.place)
          .StartRead(transfers[i], from.place.offset, run.At(index, 2 * i + 1), to.bytes());
      continue;
    }
    const std::byte* const data = run.At(index, 2 * i);
    if (run.fragment().of_state || SwapVerifier::SumsWhenMoved(to.place.pool)) {
      with_.verifier->NoteWrite(to.place, {data, static_cast<size_t>(from.bytes())});
    } else if (with_.storage->second_places() != nullptr &&
               with_.storage->second_places()->MoveTo(to.place, save)) {
      with_.verifier->NoteMove(to.place);
    }
    with_.storage->File(to.place).StartWrite(transfers[i], to.place.offset, data, from.bytes());
  }
}

void Issuer::EndTransfers(LinkedFragment& run, int index, const StepTag& step) {
  if (!std::exchange(run.started(index), uint8_t{0})) {
    run.error(index) = with_.errors->failure();
    return;
  }
  const Instruction& instruction = run[index];
  const bool reads = instruction.code == Code::kRead;
  IoTransfer* const transfers = run.transfers(index);
  for (int i = 0; i < std::ssize(instruction.operands) / 2; ++i) {
    const Operand& file = instruction.operands[static_cast<size_t>(reads ? 2 * i : 2 * i + 1)];
    const StateClass state = file.place.pool;
    const absl::Status moved = with_.storage->File(file.place).Wait(transfers[i]);
    if (run.fragment().of_state) {  // of which no read is of whole extents
      run.error(index).Update(moved);
      if (!moved.ok() && !reads) with_.verifier->Forget(file.place, file.bytes());
      continue;
    }
    if (moved.ok()) {
      if (reads && SwapVerifier::SumsWhenMoved(state)) {
        with_.verifier->VerifyRead(file.place,
                                   {run.At(index, 2 * i + 1), static_cast<size_t>(file.bytes())});
      }
      continue;
    }
    with_.errors->Fail(absl::Status(
        moved.code(),
        absl::StrCat("the engine has failed: ", step.counts ? "in step " : "after step ",
                     step.finished + (step.counts ? 1 : 0), ", the ",
                     std::string(sharding::Name(instruction.role)), " of the ",
                     std::string(Name(state)), " of unit '", std::string(run.unit_name(index)),
                     "': ", moved.message())));
  }
}

}  // namespace ebb
