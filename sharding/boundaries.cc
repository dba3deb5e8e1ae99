#include "ebb/sharding/boundaries.h"

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
    if (visit == 0) continue;
    BoundaryUse& input = uses[visit - 1];
    if (kind == ScopeKind::kForward) {
      input.reader = scope;
    } else if (input.again < 0 && !written_anew[visit - 1]) {
      input.again = scope;
    }
  }
  return uses;
}

// When it has left, its memory is another's for a scope at least before it comes.
bool LeavesDevice(const std::vector<PlannedScope>& scopes, const BoundaryUse& use) {
  if (use.writer < 0 || use.reader < 0 || use.again < 0) return false;
  const int left = scopes[static_cast<size_t>(use.reader)].close_tick + kBoundaryAhead,
            comes = scopes[static_cast<size_t>(use.again)].open_tick - kBoundaryAhead;
  return comes > left + 2;
}

}  // namespace ebb::sharding
