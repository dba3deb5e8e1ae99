#include "ebb/runtime/engine/issue/linked_list.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/runtime/engine/issue/stream_order.h"

namespace ebb {

using sharding::Code;
using sharding::Op;
using sharding::Operand;

namespace {

// BeginStep waits for the last uses of cells by parity.
bool IsAwaitedByHost(const sharding::Waits& of) {
  return std::any_of(of.leaves.begin(), of.leaves.end(),
                     [](const sharding::CellUse& use) { return use.by_parity; });
}

}  // namespace

DType GatheredDType(const Op& gather) {
  const DType first = gather.operands.front().encoding.dtype;
  const bool same =
      std::all_of(gather.operands.begin(), gather.operands.end(),
                  [first](const Operand& operand) { return operand.encoding.dtype == first; });
  return same ? first : DType::kInt8;
}

absl::StatusOr<std::unique_ptr<LinkedList>> LinkedList::Link(sharding::OpList list,
                                                             const sharding::Plan& plan,
                                                             const Device& device,
                                                             const Storage& storage,
                                                             StreamOrder& order) {
  std::unique_ptr<LinkedList> linked(new LinkedList(std::move(list), plan));
  const auto add_event = [&](int index) -> absl::StatusOr<int> {
    EBB_ASSIGN_OR_RETURN(Event event, IsAwaitedByHost(linked->waits(index))
                                          ? NewAwaitedEvent(device)
                                          : device.NewEvent());
    linked->events_.push_back(std::make_unique<Event>(std::move(event)));
    return order.AddEvent((*linked)[index].ends, *linked->events_.back());
  };
  size_t operands = 0;
  const bool has_waits = !linked->list_.waits.empty();
  for (int index = 0; index < linked->size(); ++index) {
    const Op& op = (*linked)[index];
    Linked& of = linked->linked_.emplace_back();
    of.first = operands;
    operands += op.operands.size();
    if (has_waits && linked->waits(index).awaited) {
      EBB_ASSIGN_OR_RETURN(of.events[0], add_event(index));
      of.events[1] = of.events[0];
      if (op.by_parity) {
        EBB_ASSIGN_OR_RETURN(of.events[1], add_event(index));
      }
    }
    if (op.code() == Code::kTransfer)
      of.transfers = std::make_unique<IoTransfer[]>(op.operands.size() / 2);
  }
  linked->Point(storage);
  return linked;
}

// The parts of matrices that go to their owners, or come back. `from`, `to`: what the operation
// reads and writes on this rank, which is `slice`.
std::vector<CollectiveSpan> LinkedList::SpansOfMatrices(const Op& op, std::byte* from,
                                                        std::byte* to, int slice) const {
  const sharding::Decisions& d = plan_->decisions;
  const int unit = op.parts.front().unit;
  const int64_t shard = SectionOf(*plan_, unit, /*trainable=*/true).shard,
                size = SizeOf(d.direction);
  const bool to_owners = op.role == sharding::Role::kToOwners;
  std::byte *const directions = to_owners ? from : to, *const matrices = to_owners ? to : from;
  std::vector<CollectiveSpan> spans;
  for (const sharding::MatrixPart& part : PartsOf(d.matrices[unit], shard, d.shards)) {
    const int owner = part.matrix->owner;
    std::byte* const direction =
        part.slice == slice ? directions + (part.begin - slice * shard) * size : nullptr;
    std::byte* const matrix =
        owner == slice ? matrices + (part.matrix->at + part.begin - part.matrix->begin) * size
                       : nullptr;
    spans.push_back(to_owners ? CollectiveSpan{direction, matrix, part.count(), part.slice, owner}
                              : CollectiveSpan{matrix, direction, part.count(), owner, part.slice});
  }
  if (!to_owners) {
    std::stable_sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
      return std::pair(a.from, a.to) < std::pair(b.from, b.to);
    });
  }
  return spans;
}

void LinkedList::Point(const Storage& storage) {
  pointers_.clear();
  span_lists_.Clear();
  std::vector<CollectiveSpan> spans;
  for (size_t i = 0; i < list_.ops.size(); ++i) {
    const Op& op = list_.ops[i];
    for (const Operand& operand : op.operands) {
      const bool has_memory = operand.place.pool != StateClass::kControl &&
                              operand.place.tier != Tier::kNvme &&
                              operand.access != sharding::Access::kNone;
      pointers_.push_back(has_memory ? storage.At(operand.place) : nullptr);
    }
    spans.clear();
    const auto at = [&](size_t operand) { return pointers_[linked_[i].first + operand]; };
    const std::span<const Operand> operands = op.operands;
    if (op.code() == Code::kRedistribute) {
      switch (sharding::MovementOf(op.role)) {
        case sharding::Movement::kAllGather:
          for (size_t k = 0; k < operands.size(); k += 2) {
            spans.push_back({.send = at(k),
                             .receive = at(k + 1),
                             .count = operands[k].bytes() / SizeOf(GatheredDType(op))});
          }
          break;
        case sharding::Movement::kReduceScatter:
          for (size_t part = 0, k = 0; part < op.parts.size(); ++part, k += 2)
            spans.push_back({.send = at(k), .receive = at(k + 1), .count = operands[k + 1].count});
          break;
        case sharding::Movement::kAllToAllV:
          spans = SpansOfMatrices(op, at(0), at(1), storage.shard());
          break;
        case sharding::Movement::kAllReduce:
          for (size_t k = 0; k < op.parts.size(); ++k)
            spans.push_back({.send = at(k), .receive = at(k), .count = operands[k].count});
          break;
      }
    }
    linked_[i].spans = span_lists_.KeepOnce(spans);
  }
  span_lists_.Close();
}

std::string_view LinkedList::unit_name(int op) const {
  const Op& of = (*this)[op];
  if (of.parts.empty()) return {};
  return plan_->unit_names[static_cast<size_t>(of.parts.front().unit)];
}

}  // namespace ebb
