#include "ebb/sharding/swap_files.h"

#include <algorithm>

namespace ebb::sharding {

namespace {

void AddStates(const Plan& plan, SwapFiles& files) {
  const Decisions& d = plan.decisions;
  for (const SubGroup& group : plan.pools.homes.sub_groups) {
    std::vector<SwapFiles::Array>& arrays = files.sub_groups.emplace_back();
    if (group.tier != Tier::kNvme) continue;
    files.sub_group_elements_max = std::max(files.sub_group_elements_max, group.count());
    arrays.push_back({group.master, group.count() * d.master_size()});
    for (int k = 0; k < d.optimizer_states; ++k) {
      arrays.push_back(
          {group.states.Plus(k * group.states_stride), group.count() * SizeOf(DType::kFloat32)});
    }
    for (size_t k = 0; k < arrays.size(); ++k) {
      if (arrays[k].bytes == 0) continue;
      files.extents.push_back({.what = k == 0 ? StateClass::kMaster : StateClass::kOptimizer,
                               .unit = group.unit,
                               .home = arrays[k].home,
                               .bytes = arrays[k].bytes,
                               .is_state = true});
    }
  }
}

// Sub-groups are cut where pieces of parameters are.
void AddUnit(const Plan& plan, int unit, SwapFiles& files) {
  const Decisions& d = plan.decisions;
  const UnitHomes& homes = plan.pools.homes.units[static_cast<size_t>(unit)];
  const int64_t size = SizeOf(d.compute);
  for (const ParameterPiece& piece : homes.frozen) {
    if (piece.home.tier != Tier::kNvme) continue;
    files.extents.push_back({.what = StateClass::kParameter,
                             .unit = unit,
                             .home = piece.home,
                             .bytes = piece.count() * size,
                             .trainable = false});
  }
  const Place gradient = plan.pools.GradientShard(unit);
  const int64_t gradient_size = SizeOf(d.shard_dtype(unit));
  for (int g = 0; g < homes.sub_groups; ++g) {
    const SubGroup& group =
        plan.pools.homes.sub_groups[static_cast<size_t>(homes.first_sub_group + g)];
    if (gradient.tier == Tier::kNvme) {
      files.extents.push_back({.what = StateClass::kGradient,
                               .unit = unit,
                               .home = gradient.Plus(group.begin * gradient_size),
                               .bytes = group.count() * gradient_size});
    }
    for (const ParameterPiece& piece : homes.trainable) {
      if (piece.home.tier != Tier::kNvme || group.begin < piece.begin || group.begin >= piece.end)
        continue;
      files.extents.push_back({.what = StateClass::kParameter,
                               .unit = unit,
                               .home = piece.home.Plus((group.begin - piece.begin) * size),
                               .bytes = group.count() * size,
                               .is_state = d.reads_parameters()});
    }
  }
}

void AddBoundaries(const Plan& plan, SwapFiles& files) {
  std::vector<bool> added(plan.pools.visits.size());
  for (const PlannedScope& scope : plan.scopes) {
    const auto visit = static_cast<size_t>(scope.visit);
    const VisitAddresses& at = plan.pools.visits[visit];
    if (!at.leaves || at.home.tier != Tier::kNvme || added[visit]) continue;
    added[visit] = true;
    files.extents.push_back({.what = StateClass::kActivation,
                             .unit = scope.unit,
                             .home = at.home,
                             .bytes = at.boundary_stride * plan.decisions.micro_batches_per_round});
  }
}

}  // namespace

SwapFiles LayOutSwapFiles(const Plan& plan) {
  SwapFiles files;
  AddStates(plan, files);
  for (int unit = 0; unit < static_cast<int>(plan.pools.homes.units.size()); ++unit)
    AddUnit(plan, unit, files);
  AddBoundaries(plan, files);
  return files;
}

}  // namespace ebb::sharding
