#include "ebb/runtime/engine/issue/stream_order.h"

#include <utility>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/runtime/engine/issue/linked_list.h"

namespace ebb {

using sharding::Line;
using sharding::Op;

int StreamOrder::AddEvent(Line line, Event& event) {
  events_.push_back(&event);
  return frontier_.AddEvent(line);
}

absl::Status StreamOrder::MakeFence(const Device& device) {
  while (fence_.size() < sharding::kLines) {
    EBB_ASSIGN_OR_RETURN(Event made, NewAwaitedEvent(device));
    fence_.push_back(std::move(made));
  }
  for (size_t line = 0; line < sharding::kLines; ++line)
    floor_.push_back(AddEvent(static_cast<Line>(line), fence_[line]));
  return absl::OkStatus();
}

void StreamOrder::Await(const LinkedList& run, int index, int parity) {
  const Op& op = run[index];
  const sharding::Waits& waits = run.waits(index);
  for (int wait : waits.on) {
    const int event = run.event(wait, parity % 2);
    Wait(op.starts, event);
    frontier_.Follow(op.starts, event);
  }
  frontier_.Enter(op.starts, waits.enters, parity % 2, [&](int event) { Wait(op.starts, event); });
}

void StreamOrder::Leave(const LinkedList& run, int index, int parity) {
  const Op& op = run[index];
  const int event = run.event(index, parity % 2);
  if (event >= 0) At(op.ends).Record(*events_[static_cast<size_t>(event)]);
  frontier_.Issue(op.starts, op.ends, event);
  if (event >= 0) frontier_.Leave(run.waits(index).leaves, parity % 2, event);
}

void StreamOrder::AwaitUses(const Op& op) {
  uses_.clear();
  for (const sharding::Operand& operand : op.operands) {
    ranges_.clear();
    cells_.Find(operand, ranges_);
    for (const auto& [first, last] : ranges_) {
      for (int cell = first; cell < last; ++cell)
        uses_.push_back({.cell = cell, .writes = sharding::Writes(operand.access)});
    }
  }
  frontier_.Enter(op.starts, uses_, /*parity=*/0, [&](int event) { Wait(op.starts, event); });
}

void StreamOrder::Fence() {
  EndEarly();
  ForEachOfSteps([this](Line line) {
    for (int event : frontier_.floor()) {
      if (event != floor_[line]) Wait(line, event);
      frontier_.Follow(line, event);
    }
  });
}

void StreamOrder::EndEarly() {
  std::vector<int> floor;
  ForEachOfSteps([&](Line line) {
    streams_[line]->Record(fence_[line]);
    frontier_.Issue(line, line, floor_[line]);
    floor.push_back(floor_[line]);
  });
  frontier_.SetFloor(std::move(floor));
}

void StreamOrder::AwaitParity(int parity) {
  for (int event : frontier_.floor()) events_[static_cast<size_t>(event)]->Wait();
  for (int64_t pair = control_.sums(); pair < control_.walk_sums(); pair += 2) {
    frontier_.ForEachUse(static_cast<int>(pair) + parity,
                         [this](int event) { events_[static_cast<size_t>(event)]->Wait(); });
  }
}

void StreamOrder::AwaitScale() {
  const sharding::CellUse use{.cell = static_cast<int>(control_.scale)};
  constexpr Line kCompute = sharding::LineOf(sharding::StreamId::kCompute);
  frontier_.Enter(kCompute, {&use, 1}, /*parity=*/0, [this](int event) { Wait(kCompute, event); });
}

void StreamOrder::WaitIdle() {
  WaitForSteps();
  if (Stream* const reads = streams_[sharding::kAsyncReads]; reads != nullptr) reads->WaitIdle();
  frontier_.Clear();
}

// Where transfers start before where they end. The frontier is kept, so later updates wait for
// these reads.
void StreamOrder::WaitForSteps() {
  ForEachOfSteps([this](Line line) { streams_[line]->WaitIdle(); });
}

}  // namespace ebb
