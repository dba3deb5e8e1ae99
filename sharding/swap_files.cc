#include "ebb/sharding/swap_files.h"

#include <algorithm>

namespace ebb::sharding {

namespace {

void AddStates(const Plan& plan, SwapFiles& files) {
  const Decisions& d = plan.decisions;
  for (const SubGroup& group : plan.pools.placement.sub_groups) {
    std::vector<SwapFiles::Array>& arrays = files.sub_groups.emplace_back();
    if (group.tier != Tier::kNvme) continue;
    files.sub_group_elements_max = std::max(files.sub_group_elements_max, group.count());
    arrays.push_back({group.master, group.count() * d.master_size(group.unit)});
    for (int k = 0; k < d.optimizer_states; ++k) {
      arrays.push_back(
          {group.states.Plus(k * group.states_stride), group.count() * SizeOf(DType::kFloat32)});
    }
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
  const UnitPlacement& placement = plan.pools.placement.units[static_cast<size_t>(unit)];
  const int64_t size = SizeOf(d.compute_of(unit));
  for (const ParameterPiece& piece : placement.frozen) {
    if (piece.place.tier != Tier::kNvme) continue;
    files.extents.push_back({.what = StateClass::kParameter,
                             .unit = unit,
                             .place = piece.place,
                             .bytes = piece.count() * size,
                             .trainable = false});
  }
  const Place gradient = plan.pools.GradientShard(unit);
  const int64_t gradient_size = SizeOf(d.shard_dtype(unit));
  for (int g = 0; g < placement.sub_groups; ++g) {
    const SubGroup& group =
        plan.pools.placement.sub_groups[static_cast<size_t>(placement.first_sub_group + g)];
    if (gradient.tier == Tier::kNvme) {
      files.extents.push_back({.what = StateClass::kGradient,
                               .unit = unit,
                               .place = gradient.Plus(group.begin * gradient_size),
                               .bytes = group.count() * gradient_size});
    }
    for (const ParameterPiece& piece : placement.trainable) {
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
  std::vector<bool> added(plan.pools.visits.size());
  for (const PlannedScope& scope : plan.scopes) {
    const auto visit = static_cast<size_t>(scope.visit);
    const VisitAddresses& at = plan.pools.visits[visit];
    if (!at.leaves || at.place.tier != Tier::kNvme || added[visit]) continue;
    added[visit] = true;
    files.extents.push_back({.what = StateClass::kActivation,
                             .unit = scope.unit,
                             .place = at.place,
                             .bytes = at.boundary_stride * plan.decisions.micro_batches_per_round});
  }
}

}  // namespace

SwapFiles LayOutSwapFiles(const Plan& plan) {
  SwapFiles files;
  AddStates(plan, files);
  for (int unit = 0; unit < static_cast<int>(plan.pools.placement.units.size()); ++unit)
    AddUnit(plan, unit, files);
  AddBoundaries(plan, files);
  return files;
}

}  // namespace ebb::sharding
