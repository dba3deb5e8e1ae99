#include "ebb/sharding/conflicts.h"

namespace ebb::sharding {
namespace {

bool Overlap(std::pair<int64_t, int64_t> a, std::pair<int64_t, int64_t> b) {
  return a.first < b.second && b.first < a.second;
}

}  // namespace

std::pair<int64_t, int64_t> GatherMemory(const Plan& plan, int unit) {
  const UnitAddresses& addresses = plan.pools.units[static_cast<size_t>(unit)];
  const Section& frozen = plan.layout.units[static_cast<size_t>(unit)].frozen;
  return {addresses.gather_trainable,
          addresses.gather_frozen + frozen.elements * SizeOf(plan.decisions.compute)};
}

std::pair<int64_t, int64_t> GradientMemory(const Plan& plan, const PlannedScope& scope) {
  const int64_t begin = plan.pools.visits[static_cast<size_t>(scope.visit)].gradient;
  const Section& section = plan.layout.units[static_cast<size_t>(scope.unit)].trainable;
  return {begin, begin + section.elements * SizeOf(plan.decisions.gradient)};
}

bool GathersConflict(const Plan& plan, int unit, int other) {
  const std::vector<bool>& kept_whole = plan.decisions.kept_whole;
  return unit != other && !kept_whole[unit] && !kept_whole[other] &&
         Overlap(GatherMemory(plan, unit), GatherMemory(plan, other));
}

std::vector<int> CarriedOperations(const Plan& plan) {
  std::vector<int> carried;
  for (size_t i = 0; i < plan.operations.size(); ++i)
    if (plan.operations[i].condition == Condition::kCarrying)
      carried.push_back(static_cast<int>(i));
  return carried;
}

}  // namespace ebb::sharding
