// Updates, and at stages 1 and 2 (or for units kept whole) the refresh of what every rank keeps.
#include <algorithm>
#include <utility>

#include "ebb/sharding/decisions.h"
#include "ebb/sharding/plan_builder.h"
#include "ebb/sharding/pools.h"
#include "ebb/sharding/update_chain.h"

namespace ebb::sharding {

void PlanBuilder::IssueUpdate(int unit, int turn) {
  UpdateChain chain{.unit = unit, .carried = turn >= 0};
  chain.turn = chain.carried ? turn : SharedSlot(unit);
  if (chain.carried) chain.condition = Condition::kCarrying;
  const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
  for (int g = 0; g < homes.sub_groups; ++g) {
    IssueSubGroup(chain, homes.first_sub_group + g);
    if (!chain.carried) ReadAhead();
  }
  updated_[static_cast<size_t>(unit)] = 1;
  if (chain.carried && --carried_left_ == 0) ReadAhead();
}

// Carried updates come first, in forward; then early ones, in the order in which gradients are final.
void PlanBuilder::FindEarlyUpdates() {
  for (int unit = 0; unit < static_cast<int>(plan_.layout.units.size()); ++unit)
    carried_left_ += IsCarried(unit) ? 1 : 0;
  if (d_.timing != UpdateTiming::kEarly) return;
  std::vector<int> left = contributions_left_;
  for (const std::vector<int>& group : reduction_.groups) {
    for (int s : group) {
      const int unit = plan_.scopes[s].unit;
      if (--left[unit] > 0 || IsCarried(unit)) continue;
      const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
      for (int g = 0; g < homes.sub_groups; ++g)
        early_sub_groups_.push_back(homes.first_sub_group + g);
    }
  }
}

// A disk that would wait for the next gradient reads what its update will need, as long as the
// sub-group that is updated keeps a slot of its own. Only in steps whose updates are early: others
// read all they need at once.
void PlanBuilder::ReadAhead() {
  while (carried_left_ == 0 && next_early_ < early_sub_groups_.size() &&
         ahead_.size() < kWorkSlots - 1) {
    const int index = early_sub_groups_[next_early_++];
    UpdateChain chain{.unit = plan_.pools.homes.sub_groups[static_cast<size_t>(index)].unit};
    chain.turn = SharedSlot(chain.unit);
    ahead_.emplace(index, BringStates(chain, index));
  }
}

// Units in the order in which the next forward needs them; a group of refreshes follows the last
// update it needs.
void PlanBuilder::IssueUpdates() {
  const int64_t limit = GatherGroupElements(*inputs_.config, d_.compute);
  OperationDraft refresh{.kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}};
  int64_t grouped = 0;
  const auto flush = [&] {
    if (refresh.parts.empty()) return;
    Issue(refresh);
    refresh = {.kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}};
    grouped = 0;
  };
  std::vector<bool> seen(plan_.layout.units.size(), false);
  for (const Visit& visit : inputs_.model->forward) {
    const int unit = static_cast<int>(visit.unit);
    if (seen[unit] || !d_.trainable[unit] || IsCarried(unit)) continue;
    seen[unit] = true;
    const Section& section = plan_.layout.units[unit].trainable;
    const bool refreshes = d_.kept_whole[unit] && d_.stage > 0 && d_.shards > 1;
    if (refreshes && grouped > 0 && grouped + section.elements > limit) flush();
    if (!updated_[static_cast<size_t>(unit)]) IssueUpdate(unit);
    if (!refreshes) continue;
    refresh.parts.push_back({.unit = unit});
    refresh.bytes += RingBytes(section.shard, d_.compute);
    grouped += section.elements;
  }
  flush();
}

}  // namespace ebb::sharding
