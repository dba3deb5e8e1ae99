// Updates, and at stages 1 and 2 (or for units kept whole) the refresh of what every rank keeps.
#include <utility>

#include "ebb/sharding/decisions.h"
#include "ebb/sharding/plan_builder.h"

namespace ebb::sharding {

int64_t PlanBuilder::UpdateBytes(int unit) const {
  const Section& section = plan_.layout.units[unit].trainable;
  const int64_t elements = d_.stage == 0 ? section.elements : section.shard;
  const int64_t states = 8 * (1 + d_.optimizer_states) + SizeOf(d_.shard_dtype(unit));
  return elements * (states + (d_.compute == DType::kFloat32 ? 0 : SizeOf(d_.compute)));
}

void PlanBuilder::IssueUpdate(int unit) {
  std::vector<Dependency> after;
  if (gradient_final_[unit] >= 0) after.push_back({Dependency::kOperation, gradient_final_[unit]});
  if (d_.timing != UpdateTiming::kEarly) after.push_back({Dependency::kOperation, exchange_});
  // The last gather has read the slice that the update writes.
  if (last_gather_[unit] >= 0) after.push_back({Dependency::kOperation, last_gather_[unit]});
  update_of_unit_[unit] = Issue({.kind = OperationKind::kUpdate,
                                 .stream = StreamId::kUpdate,
                                 .parts = {{.unit = unit}},
                                 .after = std::move(after),
                                 .bytes = UpdateBytes(unit)});
}

// Units in the order in which the next forward needs them; a group of refreshes follows the last
// update it needs.
void PlanBuilder::IssueUpdates() {
  const int64_t limit = GatherGroupElements(*inputs_.config, d_.compute);
  Operation refresh{
      .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
  int64_t grouped = 0;
  const auto flush = [&] {
    if (refresh.parts.empty()) return;
    Issue(std::move(refresh));
    refresh = {
        .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
    grouped = 0;
  };
  std::vector<bool> seen(plan_.layout.units.size(), false);
  for (const Visit& visit : inputs_.model->forward) {
    const int unit = static_cast<int>(visit.unit);
    if (seen[unit] || !d_.trainable[unit]) continue;
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
