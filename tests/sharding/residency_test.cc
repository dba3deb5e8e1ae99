#include "ebb/sharding/residency.h"

#include <gtest/gtest.h>

namespace ebb::sharding {
namespace {
TEST(X, Y) {
  std::vector<int> visits = {0, 1, 0, 2, 3, 2};
  std::vector<PlannedScope> scopes;
  for (int v = 0; v < 6; ++v) scopes.push_back({false, 0, v, visits[v]});
  for (int v = 5; v >= 0; --v) scopes.push_back({true, 0, v, visits[v]});
  std::vector<int64_t> elements = {1, 1, 1, 1};
  std::vector<bool> whole(4, false);
  Residency r = PlanResidency(scopes, elements, whole,
                              {.prefetch_depth = 0, .group_elements = 100, .reshard_after_forward = false});
  for (auto& g : r.groups) {
    printf("tick %d:", g.issue);
    for (int i : g.stays) printf(" u%d[%d..%d]", r.stays[i].unit, r.stays[i].first, r.stays[i].last);
    printf("\n");
  }
}
}  // namespace
}  // namespace ebb::sharding
