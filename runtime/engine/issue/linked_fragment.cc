#include "ebb/runtime/engine/issue/linked_fragment.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/runtime/engine/issue/stream_order.h"

namespace ebb {

using sharding::Code;
using sharding::Instruction;
using sharding::Operand;

namespace {

// BeginStep waits for the last uses of cells by parity.
bool IsAwaitedByHost(const Instruction& instruction) {
  return std::any_of(instruction.leaves.begin(), instruction.leaves.end(),
                     [](const sharding::CellUse& use) { return use.by_parity; });
}

}  // namespace

DType GatheredDType(const Instruction& gather) {
  const DType first = gather.operands.front().dtype;
  const bool same = std::all_of(gather.operands.begin(), gather.operands.end(),
                                [first](const Operand& operand) { return operand.dtype == first; });
  return same ? first : DType::kInt8;
}

absl::StatusOr<std::unique_ptr<LinkedFragment>> LinkedFragment::Link(sharding::Fragment fragment,
                                                                     const sharding::Plan& plan,
                                                                     const Device& device,
                                                                     const Storage& storage,
                                                                     StreamOrder& order) {
  std::unique_ptr<LinkedFragment> linked(new LinkedFragment(std::move(fragment), plan));
  const auto add_event = [&](const Instruction& instruction) -> absl::StatusOr<int> {
    EBB_ASSIGN_OR_RETURN(
        Event event, IsAwaitedByHost(instruction) ? NewAwaitedEvent(device) : device.NewEvent());
    linked->events_.push_back(std::make_unique<Event>(std::move(event)));
    return order.AddEvent(instruction.ends, *linked->events_.back());
  };
  size_t operands = 0;
  for (const Instruction& instruction : linked->fragment_.instructions) {
    Linked& of = linked->linked_.emplace_back();
    of.first = operands;
    operands += instruction.operands.size();
    if (instruction.awaited) {
      EBB_ASSIGN_OR_RETURN(of.events[0], add_event(instruction));
      of.events[1] = of.events[0];
      if (instruction.by_parity) {
        EBB_ASSIGN_OR_RETURN(of.events[1], add_event(instruction));
      }
    }
    if (instruction.code == Code::kRead || instruction.code == Code::kWrite)
      of.transfers = std::make_unique<IoTransfer[]>(instruction.operands.size() / 2);
  }
  linked->Point(storage);
  return linked;
}

void LinkedFragment::Point(const Storage& storage) {
  pointers_.clear();
  span_lists_.Clear();
  std::vector<CollectiveSpan> spans;
  for (size_t i = 0; i < fragment_.instructions.size(); ++i) {
    const Instruction& instruction = fragment_.instructions[i];
    for (const Operand& operand : instruction.operands) {
      const bool has_memory = operand.place.pool != StateClass::kControl &&
                              operand.place.tier != Tier::kNvme &&
                              operand.access != sharding::Access::kNone;
      pointers_.push_back(has_memory ? storage.At(operand.place) : nullptr);
    }
    spans.clear();
    const auto at = [&](size_t operand) { return pointers_[linked_[i].first + operand]; };
    const std::span<const Operand> operands = instruction.operands;
    switch (instruction.code) {
      case Code::kAllGather:
        for (size_t k = 0; k < operands.size(); k += 2) {
          spans.push_back({.send = at(k),
                           .receive = at(k + 1),
                           .count = operands[k].bytes() / SizeOf(GatheredDType(instruction))});
        }
        break;
      case Code::kReduceScatter:
        for (size_t part = 0, k = 0; part < instruction.parts.size(); ++part, k += 2)
          spans.push_back({.send = at(k), .receive = at(k + 1), .count = operands[k + 1].count});
        break;
      case Code::kAllReduce:
        for (size_t k = 0; k < instruction.parts.size(); ++k)
          spans.push_back({.send = at(k), .receive = at(k), .count = operands[k].count});
        break;
      default:
        break;
    }
    linked_[i].spans = span_lists_.KeepOnce(spans);
  }
  span_lists_.Close();
}

std::string_view LinkedFragment::unit_name(int instruction) const {
  const Instruction& of = (*this)[instruction];
  if (of.parts.empty()) return {};
  return plan_->unit_names[static_cast<size_t>(of.parts.front().unit)];
}

}  // namespace ebb
