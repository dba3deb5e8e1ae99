#include "ebb/sharding/swap_files.h"

#include <algorithm>

namespace ebb::sharding {

namespace {

void AddStates(const Plan& plan, SwapFiles& files) {
  const Decisions& d = plan.decisions;
  const Table& table = plan.table;
  for (const SubGroup& group : table.sub_groups) {
    std::vector<SwapFiles::Array>& arrays = files.sub_groups.emplace_back();
    if (group.tier != Tier::kNvme) continue;
    files.sub_group_elements_max = std::max(files.sub_group_elements_max, group.count());
    const auto add = [&](int row) {
      const bool is_kept = table[row].elements > 0;
      arrays.push_back({table.PlaceOf(row, group.begin),
                        is_kept ? group.count() * SizeOf(table[row].dtype) : 0});
    };
    add(table.Find(Purpose::kMaster, group.unit));
    for (int k = 0; k < d.optimizer_states; ++k)
      add(table.Find(Purpose::kState, group.unit, /*trainable=*/true, k));
    for (size_t k = 0; k < arrays.size(); ++k) {
      if (arrays[k].bytes == 0) continue;
      files.extents.push_back({.what = k == 0 ? StateClass::kMaster : StateClass::kOptimizer,
                               .unit = group.unit,
                               .place = arrays[k].place,
                               .bytes = arrays[k].bytes,
                               .is_state = true});
    }
  }
}

// Sub-groups are cut where pieces of parameters are.
void AddUnit(const Plan& plan, int unit, SwapFiles& files) {
  const Decisions& d = plan.decisions;
  const Table& table = plan.table;
  const int64_t size = SizeOf(d.compute_of(unit));
  const auto frozen = table.ExtentsOf(table.Find(Purpose::kParameter, unit, /*trainable=*/false));
  for (const Extent& piece : frozen) {
    if (piece.place.tier != Tier::kNvme) continue;
    files.extents.push_back({.what = StateClass::kParameter,
                             .unit = unit,
                             .place = piece.place,
                             .bytes = piece.count() * size,
                             .trainable = false});
  }
  const int gradient = table.Find(Purpose::kGradientShard, unit);
  const auto trainable = table.ExtentsOf(table.Find(Purpose::kParameter, unit));
  for (const SubGroup& group : table.SubGroupsOf(unit)) {
    if (table.TierOf(gradient) == Tier::kNvme) {
      files.extents.push_back({.what = StateClass::kGradient,
                               .unit = unit,
                               .place = table.PlaceOf(gradient, group.begin),
                               .bytes = group.count() * SizeOf(table[gradient].dtype)});
    }
    for (const Extent& piece : trainable) {
      if (piece.place.tier != Tier::kNvme || group.begin < piece.begin || group.begin >= piece.end)
        continue;
      files.extents.push_back({.what = StateClass::kParameter,
                               .unit = unit,
                               .place = piece.place.Plus((group.begin - piece.begin) * size),
                               .bytes = group.count() * size,
                               .is_state = d.reads_parameters(unit)});
    }
  }
}

void AddBoundaries(const Plan& plan, SwapFiles& files) {
  std::vector<bool> added(static_cast<size_t>(plan.table.visits));
  for (const PlannedScope& scope : plan.scopes) {
    const int row = plan.table.Find(Purpose::kOutputAway, scope.visit);
    const Place place = plan.table.PlaceOf(row);
    if (place.tier != Tier::kNvme || added[static_cast<size_t>(scope.visit)]) continue;
    added[static_cast<size_t>(scope.visit)] = true;
    files.extents.push_back({.what = StateClass::kActivation,
                             .unit = scope.unit,
                             .place = place,
                             .bytes = plan.table[row].bytes()});
  }
}

}  // namespace

SwapFiles LayOutSwapFiles(const Plan& plan) {
  SwapFiles files;
  AddStates(plan, files);
  for (int unit = 0; unit < plan.table.units; ++unit) AddUnit(plan, unit, files);
  AddBoundaries(plan, files);
  return files;
}

}  // namespace ebb::sharding
