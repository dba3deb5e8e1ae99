#include "ebb/sharding/boundaries.h"

namespace ebb::sharding {

std::vector<BoundaryUse> UsesInRound(const std::vector<PlannedScope>& scopes, size_t first,
                                     int visits) {
  std::vector<BoundaryUse> uses(static_cast<size_t>(visits));
  for (size_t s = first; s < scopes.size() && scopes[s].round == scopes[first].round; ++s) {
    const int visit = scopes[s].visit, scope = static_cast<int>(s);
    if (!scopes[s].backward) uses[static_cast<size_t>(visit)].writer = scope;
    if (visit == 0) continue;
    BoundaryUse& input = uses[static_cast<size_t>(visit - 1)];
    (scopes[s].backward ? input.backward : input.reader) = scope;
  }
  return uses;
}

bool LeavesDevice(const BoundaryUse& use) {
  return use.writer >= 0 && use.reader >= 0 &&
         use.backward - kBoundaryAhead > use.reader + kBoundaryAhead + 1;
}

}  // namespace ebb::sharding
