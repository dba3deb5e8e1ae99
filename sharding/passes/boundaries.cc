#include "ebb/sharding/passes/boundaries.h"

namespace ebb::sharding {

std::vector<BoundaryUse> UsesInRound(const std::vector<PlannedScope>& scopes, size_t first,
                                     int visits) {
  std::vector<BoundaryUse> uses(static_cast<size_t>(visits));
  std::vector<bool> written_anew(static_cast<size_t>(visits), false);
  for (size_t s = first; s < scopes.size() && scopes[s].round == scopes[first].round; ++s) {
    const size_t visit = static_cast<size_t>(scopes[s].visit);
    const int scope = static_cast<int>(s);
    const ScopeKind kind = scopes[s].kind();
    if (kind == ScopeKind::kForward) uses[visit].writer = scope;
    if (kind == ScopeKind::kRecompute) written_anew[visit] = true;
    if (scopes[s].input < 0) continue;
    const size_t before = static_cast<size_t>(scopes[s].input);
    BoundaryUse& input = uses[before];
    if (kind == ScopeKind::kForward) {
      input.reader = scope;
    } else if (input.again < 0 && !written_anew[before]) {
      input.again = scope;
    }
  }
  return uses;
}

// After it has left, another boundary uses its memory for at least one scope before it comes back.
bool LeavesDevice(const std::vector<PlannedScope>& scopes, const BoundaryUse& use) {
  if (use.writer < 0 || use.reader < 0 || use.again < 0) return false;
  const int left = scopes[use.reader].close_tick + kBoundaryAhead,
            comes = scopes[use.again].open_tick - kBoundaryAhead;
  return comes > left + 2;
}

BoundaryTicks TicksOfBoundaries(const std::vector<PlannedScope>& scopes,
                                const std::vector<bool>& leaves) {
  const std::vector<std::vector<int>> none(2 * scopes.size() + 1);
  BoundaryTicks ticks{.leaving = none, .reading = none, .coming = none};
  const auto visits = static_cast<int>(leaves.size());
  for (size_t s = 0; s < scopes.size(); ++s) {
    if (s > 0 && scopes[s].round == scopes[s - 1].round) continue;
    const std::vector<BoundaryUse> uses = UsesInRound(scopes, s, visits);
    for (int v = 0; v < visits; ++v) {
      const BoundaryUse& use = uses[v];
      if (!leaves[v] || !LeavesDevice(scopes, use)) continue;
      const int left = scopes[use.reader].close_tick, again = scopes[use.again].open_tick;
      ticks.leaving[left].push_back(v);
      ticks.coming[again - kBoundaryAhead].push_back(v);
      ticks.reading[again - 2 * kBoundaryAhead].push_back(v);
    }
  }
  return ticks;
}

}  // namespace ebb::sharding
