// Updates, and at stages 1 and 2 (or for units kept whole) the refresh of what every rank keeps.
#include <algorithm>
#include <utility>

#include "ebb/sharding/decisions.h"
#include "ebb/sharding/plan_builder.h"
#include "ebb/sharding/pools.h"
#include "ebb/sharding/update_chain.h"

namespace ebb::sharding {

void PlanBuilder::IssueUpdate(int unit, int turn) {
  UpdateChain chain(unit);
  chain.carried = turn >= 0;
  chain.turn = chain.carried ? turn : SharedSlot(unit);
  chain.shared = shared_read_[unit];
  if (chain.carried) {
    chain.condition = Condition::kCarrying;
    chain.ready.push_back({Dependency::kExchanged, 0});
  } else {
    if (gradient_final_[unit] >= 0)
      chain.ready.push_back({Dependency::kOperation, gradient_final_[unit]});
    if (d_.timing != UpdateTiming::kEarly)
      chain.ready.push_back({Dependency::kOperation, exchange_});
    // Every update reads constants of which some come from the norms.
    if (exchange_norms_ >= 0) chain.ready.push_back({Dependency::kOperation, exchange_norms_});
    // The last gather has read the slice that the update writes.
    if (last_gather_[unit] >= 0)
      chain.ready.push_back({Dependency::kOperation, last_gather_[unit]});
  }
  const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
  for (int g = 0; g < homes.sub_groups; ++g) {
    IssueSubGroup(chain, homes.first_sub_group + g);
    if (!chain.carried) ReadAhead();
  }

  // The parameters are there when the last operation of every stream but that of the writes has run.
  constexpr int kWrites = static_cast<int>(StreamId::kWrite),
                kReads = static_cast<int>(StreamId::kReadStates);
  std::vector<int> lasts;
  for (int s = 0; s < kStreams; ++s) {
    if (s != kWrites && s != kReads && chain.last[s] >= 0) lasts.push_back(chain.last[s]);
  }
  int last = *std::max_element(lasts.begin(), lasts.end());
  if (lasts.size() > 1) {
    OperationDraft settled{.kind = OperationKind::kMark,
                           .stream = plan_.operations[static_cast<size_t>(last)].stream,
                           .parts = {{.unit = unit}},
                           .after = {},
                           .condition = chain.condition,
                           .of_update = true};
    for (int operation : lasts) {
      if (operation != last) settled.after.push_back({Dependency::kOperation, operation});
    }
    last = Issue(settled);
  }
  plan_.operations[static_cast<size_t>(last)].updates = unit;
  if (chain.stores) plan_.operations[static_cast<size_t>(chain.last[kWrites])].stores = unit;
  update_of_unit_[unit] = last;
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
    UpdateChain chain(plan_.pools.homes.sub_groups[static_cast<size_t>(index)].unit);
    chain.turn = SharedSlot(chain.unit);
    ahead_.emplace(index, BringStates(chain, index));
  }
}

// Units in the order in which the next forward needs them; a group of refreshes follows the last
// update it needs.
void PlanBuilder::IssueUpdates() {
  const int64_t limit = GatherGroupElements(*inputs_.config, d_.compute);
  OperationDraft refresh{
      .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
  int64_t grouped = 0;
  const auto flush = [&] {
    if (refresh.parts.empty()) return;
    Issue(refresh);
    refresh = {
        .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
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
    if (update_of_unit_[unit] < 0) IssueUpdate(unit);
    if (!refreshes) continue;
    refresh.parts.push_back({.unit = unit});
    refresh.after.push_back({Dependency::kOperation, update_of_unit_[unit]});
    refresh.bytes += RingBytes(section.shard, d_.compute);
    grouped += section.elements;
  }
  flush();
}

}  // namespace ebb::sharding
