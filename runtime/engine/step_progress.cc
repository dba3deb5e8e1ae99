#include "ebb/runtime/engine/step_progress.h"

#include <algorithm>

namespace ebb {

OpenScope* StepProgress::Find(int64_t id) {
  const auto found = std::find_if(open.begin(), open.end(),
                                  [&](const OpenScope& scope) { return scope.id == id; });
  return found == open.end() ? nullptr : &*found;
}

int StepProgress::NextCode() const {
  const std::vector<sharding::PlannedScope>& scopes = plan().scopes;
  const size_t next = static_cast<size_t>(order.next());
  return next < scopes.size() ? sharding::ScopeCode(scopes[next].kind(), scopes[next].unit)
                              : ScopeTrail::kNothing;
}

}  // namespace ebb
