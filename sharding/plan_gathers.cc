// Gathers: as early as their slot, the prefetch limits and their unit's last update allow.
//
// With secondary shards (hpZ) the first gather of a unit is over all its slices, and each rank keeps a
// part of it for the gathers that follow in the step, which stay within a group of ranks:
//
//   gather over 4 ranks     | 0 | 1 | 2 | 3 |
//   filled on the ranks     | 0     | 1     |   of each group of 2
#include <algorithm>
#include <utility>

#include "ebb/sharding/plan_builder.h"

namespace ebb::sharding {

void PlanBuilder::IssueGathers(int tick) {
  for (; next_group_ < residency_.groups.size(); ++next_group_) {
    const GatherGroup& group = residency_.groups[next_group_];
    if (group.issue != tick) return;
    OperationDraft gather{
        .kind = group.from_secondary ? OperationKind::kGatherSecondary : OperationKind::kGather,
        .stream = StreamId::kGather,
        .parts = {}};
    for (int i : group.stays) {
      const Stay& stay = residency_.stays[i];
      gather.parts.push_back({stay.unit, stay.first});
      gather.bytes += GatherBytes(stay);
    }
    if (!group.from_secondary) UploadParameters(group, static_cast<int>(next_group_));
    const int index = Issue(gather);
    IssueFill(group);
    for (int i : group.stays) {
      const Stay& stay = residency_.stays[i];
      for (int s = stay.first; s <= stay.last; ++s)
        if (plan_.scopes[s].unit == stay.unit) plan_.gather_of_scope[s] = index;
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

void PlanBuilder::IssueFill(const GatherGroup& group) {
  OperationDraft fill{
      .kind = OperationKind::kFillSecondary, .stream = StreamId::kGather, .parts = {}};
  for (int i : group.stays) {
    const Stay& stay = residency_.stays[i];
    if (!stay.fills_secondary) continue;
    const UnitLayout& unit = plan_.layout.units[stay.unit];
    fill.parts.push_back({stay.unit, stay.first});
    fill.bytes += 2 * (d_.SecondaryShard(unit.trainable) + d_.SecondaryShard(unit.frozen)) *
                  SizeOf(d_.compute);
  }
  if (!fill.parts.empty()) Issue(fill);
}

}  // namespace ebb::sharding
