#include "ebb/sharding/pools/last_gathers.h"

namespace ebb::sharding {

std::vector<LastGather> FindLastGathers(std::span<const PlannedScope> scopes,
                                        const Residency& residency, const Reduction& reduction,
                                        int units) {
  std::vector<LastGather> gathers(static_cast<size_t>(units));
  for (size_t g = 0; g < residency.groups.size(); ++g) {
    for (int i : residency.groups[g].intervals) {
      const ResidencyInterval& interval = residency.intervals[static_cast<size_t>(i)];
      LastGather& gather = gathers[static_cast<size_t>(interval.unit)];
      gather.interval = i;
      gather.group = static_cast<int>(g);
      const PlannedScope &first = scopes[static_cast<size_t>(interval.first)],
                         &last = scopes[static_cast<size_t>(interval.last)];
      gather.may_share =
          first.kind() != ScopeKind::kForward || last.open_tick == first.close_tick + 1;
    }
  }
  // The last reduction of a unit is the one that makes its gradient final.
  for (const std::vector<int>& group : reduction.groups) {
    for (int s : group) {
      gathers[static_cast<size_t>(scopes[static_cast<size_t>(s)].unit)].updated =
          scopes[static_cast<size_t>(group.back())].close_tick;
    }
  }
  return gathers;
}

}  // namespace ebb::sharding
