// Gathers: as early as their slot, the prefetch limits and their unit's last update allow.
//
// With secondary shards (hpZ) the first gather of a unit is over all its slices, and each rank keeps a
// part of it for the gathers that follow in the step, which stay within a group of ranks:
//
//   gather over 4 ranks     | 0 | 1 | 2 | 3 |
//   filled on the ranks     | 0     | 1     |   of each group of 2
//
// Kernels wait for the fill, and not for the gather alone: so whatever takes the slot behind them comes
// behind the fill, too.
#include <algorithm>
#include <utility>

#include "ebb/sharding/conflicts.h"
#include "ebb/sharding/plan_builder.h"

namespace ebb::sharding {

void PlanBuilder::IssueGathers(int tick) {
  for (; next_group_ < residency_.groups.size(); ++next_group_) {
    const GatherGroup& group = residency_.groups[next_group_];
    if (group.issue != tick) return;
    OperationDraft gather{
        .kind = group.from_secondary ? OperationKind::kGatherSecondary : OperationKind::kGather,
        .stream = StreamId::kGather,
        .parts = {},
        .after = {}};
    int previous_user = plan_.moments.front().begin;  // the begin mark: all of earlier steps
    std::vector<Dependency> filled_or_updated;
    for (int i : group.stays) {
      const Stay& stay = residency_.stays[i];
      gather.parts.push_back({stay.unit, stay.first});
      gather.bytes += GatherBytes(stay);
      previous_user = std::max(previous_user, LastUserOfSlot(stay.unit));
      if (stay.from_secondary) {
        const Dependency filled{Dependency::kOperation, fill_of_unit_[stay.unit]};
        if (std::find(filled_or_updated.begin(), filled_or_updated.end(), filled) ==
            filled_or_updated.end())
          filled_or_updated.push_back(filled);
      } else if (last_gather_[stay.unit] < 0 && d_.trainable[stay.unit]) {
        filled_or_updated.push_back({Dependency::kUpdated, stay.unit});
      }
    }
    gather.after.push_back({Dependency::kOperation, previous_user});
    gather.after.insert(gather.after.end(), filled_or_updated.begin(), filled_or_updated.end());
    int upload = -1;
    if (!group.from_secondary)
      upload = UploadParameters(group, static_cast<int>(next_group_), gather.after);
    if (upload >= 0) gather.after = {{Dependency::kOperation, upload}};
    const int index = Issue(gather);
    const int fill = IssueFill(group);
    for (int i : group.stays) {
      const Stay& stay = residency_.stays[i];
      if (!stay.from_secondary) last_gather_[stay.unit] = upload >= 0 ? upload : index;
      if (stay.fills_secondary) fill_of_unit_[stay.unit] = fill;
      for (int s = stay.first; s <= stay.last; ++s) {
        if (plan_.scopes[s].unit != stay.unit) continue;
        plan_.gather_of_scope[s] = index;
        ready_of_scope_[s] = stay.fills_secondary ? fill : index;
      }
    }
  }
}

// Of one unit, from other ranks.
int64_t PlanBuilder::GatherBytes(const Stay& stay) const {
  const UnitLayout& unit = plan_.layout.units[stay.unit];
  if (!stay.from_secondary) return RingBytes(unit.shard(), d_.compute);
  const int64_t part = d_.SecondaryShard(unit.trainable) + d_.SecondaryShard(unit.frozen);
  return (d_.secondary_shards - 1) * part * SizeOf(d_.compute);
}

int PlanBuilder::IssueFill(const GatherGroup& group) {
  OperationDraft fill{
      .kind = OperationKind::kFillSecondary, .stream = StreamId::kGather, .parts = {}, .after = {}};
  for (int i : group.stays) {
    const Stay& stay = residency_.stays[i];
    if (!stay.fills_secondary) continue;
    const UnitLayout& unit = plan_.layout.units[stay.unit];
    fill.parts.push_back({stay.unit, stay.first});
    fill.bytes += 2 * (d_.SecondaryShard(unit.trainable) + d_.SecondaryShard(unit.frozen)) *
                  SizeOf(d_.compute);
  }
  return fill.parts.empty() ? -1 : Issue(fill);
}

// The mark of the last closed scope whose unit's slot overlaps this unit's. Marks are in compute
// order, so waiting for the last one covers those before it.
int PlanBuilder::LastUserOfSlot(int unit) const {
  const auto [begin, end] = GatherMemory(plan_, unit);
  const int scope = slots_used_.Latest(begin, end);
  return scope < 0 ? -1 : mark_of_scope_[scope];
}

}  // namespace ebb::sharding
