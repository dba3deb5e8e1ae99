#include "ebb/sharding/reduction.h"

#include <algorithm>

namespace ebb::sharding {

Reduction PlanReduction(const std::vector<PlannedScope>& scopes, const ModelLayout& layout,
                        const Decisions& decisions, int visits, int64_t group_bytes) {
  const int count = static_cast<int>(scopes.size());
  Reduction reduction{
      .groups = {}, .group_of_scope = std::vector<int>(scopes.size(), -1), .lifetimes = {}};
  int64_t grouped = 0;
  for (int s = 0; s < count; ++s) {
    const PlannedScope& scope = scopes[s];
    const bool last_round = scope.round == decisions.rounds - 1;
    if (!scope.backward || !decisions.trainable[scope.unit]) continue;
    if (decisions.keeps_step_gradients && !last_round) continue;
    const int64_t bytes =
        layout.units[scope.unit].trainable.elements * SizeOf(decisions.communication);
    bool joins = !reduction.groups.empty() && grouped + bytes <= group_bytes;
    if (joins) {
      joins = scopes[reduction.groups.back().front()].round == scope.round;
      for (int other : reduction.groups.back()) joins &= scopes[other].unit != scope.unit;
    }
    if (!joins) {
      reduction.groups.emplace_back();
      grouped = 0;
    }
    reduction.groups.back().push_back(s);
    reduction.group_of_scope[s] = static_cast<int>(reduction.groups.size()) - 1;
    grouped += bytes;
  }

  reduction.lifetimes.resize(decisions.keeps_step_gradients ? visits : layout.units.size());
  for (int s = 0; s < count; ++s) {
    const int group = reduction.group_of_scope[s];
    if (group < 0) continue;
    const int issued_at = reduction.groups[group].back();
    const int end = CloseTick(std::min(issued_at + 1, count - 1));
    int begin = OpenTick(s);
    if (decisions.keeps_step_gradients) {
      for (int first = 0; first <= s; ++first) {
        if (scopes[first].backward && scopes[first].visit == scopes[s].visit) {
          begin = OpenTick(first);
          break;
        }
      }
    }
    reduction.lifetimes[GradientKey(decisions, scopes[s])].push_back({begin, end});
  }
  return reduction;
}

}  // namespace ebb::sharding
