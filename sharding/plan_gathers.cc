// Gathers: as early as their slot, the prefetch limits and their unit's last update allow.
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
        .kind = OperationKind::kGather, .stream = StreamId::kGather, .parts = {}, .after = {}};
    int previous_user = plan_.moments.front().begin;  // the begin mark: all of earlier steps
    std::vector<Dependency> updates;
    for (int i : group.stays) {
      const Stay& stay = residency_.stays[i];
      const UnitLayout& unit = plan_.layout.units[stay.unit];
      gather.parts.push_back({stay.unit, stay.first});
      gather.bytes += RingBytes(unit.shard(), d_.compute);
      previous_user = std::max(previous_user, LastUserOfSlot(stay.unit));
      if (last_gather_[stay.unit] < 0 && d_.trainable[stay.unit])
        updates.push_back({Dependency::kUpdated, stay.unit});
    }
    gather.after.push_back({Dependency::kOperation, previous_user});
    gather.after.insert(gather.after.end(), updates.begin(), updates.end());
    const int upload = UploadParameters(group, static_cast<int>(next_group_), gather.after);
    if (upload >= 0) gather.after = {{Dependency::kOperation, upload}};
    const int index = Issue(gather);
    for (int i : group.stays) {
      const Stay& stay = residency_.stays[i];
      last_gather_[stay.unit] = upload >= 0 ? upload : index;
      for (int s = stay.first; s <= stay.last; ++s) {
        if (plan_.scopes[s].unit == stay.unit) plan_.gather_of_scope[s] = index;
      }
    }
  }
}

// The mark of the last closed scope whose unit's slot overlaps this unit's. Marks are in compute
// order, so waiting for the last one covers those before it.
int PlanBuilder::LastUserOfSlot(int unit) const {
  const auto [begin, end] = GatherMemory(plan_, unit);
  const int scope = slots_used_.Latest(begin, end);
  return scope < 0 ? -1 : mark_of_scope_[scope];
}

}  // namespace ebb::sharding
