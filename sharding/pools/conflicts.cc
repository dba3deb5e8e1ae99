#include "ebb/sharding/pools/conflicts.h"

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
          addresses.gather_frozen + frozen.elements * SizeOf(plan.decisions.compute_of(unit))};
}

bool GathersConflict(const Plan& plan, int unit, int other) {
  const std::vector<bool>& kept_whole = plan.decisions.kept_whole;
  return unit != other && !kept_whole[unit] && !kept_whole[other] &&
         Overlap(GatherMemory(plan, unit), GatherMemory(plan, other));
}

}  // namespace ebb::sharding
