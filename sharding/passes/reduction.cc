#include "ebb/sharding/passes/reduction.h"

#include <algorithm>

namespace ebb::sharding {

Reduction PlanReduction(const std::vector<PlannedScope>& scopes, const ModelLayout& layout,
                        const Decisions& decisions, int visits, int64_t group_bytes) {
  Reduction reduction{.groups = {},
                      .group_of_scope = std::vector<int>(scopes.size(), -1),
                      .is_first = std::vector<bool>(scopes.size(), false),
                      .is_last = std::vector<bool>(scopes.size(), false),
                      .lifetimes = {}};
  int64_t grouped = 0;
  bool sealed = false;  // the newest group
  const auto has_unit = [&](int unit) {
    return !reduction.groups.empty() &&
           std::any_of(reduction.groups.back().begin(), reduction.groups.back().end(),
                       [&](int other) { return scopes[other].unit == unit; });
  };
  for (const auto& [s, opens] : TicksOf(scopes)) {
    const PlannedScope& scope = scopes[s];
    const bool last_round = scope.round == decisions.rounds - 1;
    if (!scope.gradients) continue;
    if (decisions.keeps_step_gradients && !last_round) continue;
    if (opens) {
      // The scope writes where a gradient of the group lies, which is reduced before.
      sealed |= has_unit(scope.unit);
      continue;
    }
    const int64_t bytes = layout.units[scope.unit].trainable.elements *
                          SizeOf(decisions.communication_of(scope.unit));
    const bool joins = !reduction.groups.empty() && grouped + bytes <= group_bytes && !sealed &&
                       scopes[reduction.groups.back().front()].round == scope.round &&
                       decisions.compute_of(scopes[reduction.groups.back().front()].unit) ==
                           decisions.compute_of(scope.unit) &&
                       !has_unit(scope.unit);
    if (!joins) {
      reduction.groups.emplace_back();
      grouped = 0;
      sealed = false;
    }
    reduction.groups.back().push_back(s);
    reduction.group_of_scope[s] = static_cast<int>(reduction.groups.size()) - 1;
    grouped += bytes;
  }
  std::vector<int> last(layout.units.size(), -1);  // the unit's newest contribution
  for (const std::vector<int>& group : reduction.groups) {
    for (int s : group) {
      int& before = last[scopes[s].unit];
      reduction.is_first[s] = before < 0;
      before = s;
    }
  }
  for (int s : last)
    if (s >= 0) reduction.is_last[s] = true;

  const int end_of_step = 2 * static_cast<int>(scopes.size());
  reduction.lifetimes.resize(decisions.keeps_step_gradients ? visits : layout.units.size());
  for (int s = 0; s < static_cast<int>(scopes.size()); ++s) {
    const int group = reduction.group_of_scope[s];
    if (group < 0) continue;
    const int end = std::min(scopes[reduction.groups[group].back()].close_tick + 2, end_of_step);
    int begin = scopes[s].open_tick;
    if (decisions.keeps_step_gradients) {
      for (int first = 0; first <= s; ++first) {
        if (scopes[first].backward && scopes[first].visit == scopes[s].visit) {
          begin = scopes[first].open_tick;
          break;
        }
      }
    }
    reduction.lifetimes[GradientKey(decisions, scopes[s])].push_back({begin, end});
  }
  return reduction;
}

std::vector<LastGather> FindLastGathers(std::span<const PlannedScope> scopes,
                                        const Residency& residency, const Reduction& reduction,
                                        int units) {
  std::vector<LastGather> gathers(static_cast<size_t>(units));
  for (size_t g = 0; g < residency.groups.size(); ++g) {
    for (int i : residency.groups[g].intervals) {
      const ResidencyInterval& interval = residency.intervals[i];
      LastGather& gather = gathers[interval.unit];
      gather.interval = i;
      gather.group = static_cast<int>(g);
      const PlannedScope &first = scopes[interval.first], &last = scopes[interval.last];
      gather.may_share =
          first.kind() != ScopeKind::kForward || last.open_tick == first.close_tick + 1;
    }
  }
  // The last reduction of a unit is the one that makes its gradient final.
  for (const std::vector<int>& group : reduction.groups) {
    for (int s : group) {
      gathers[scopes[s].unit].updated = scopes[group.back()].close_tick;
    }
  }
  return gathers;
}

}  // namespace ebb::sharding
