// Trails of two ranks name the first scope in which their logs differ.
#include "ebb/runtime/engine/scope_trail.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/sharding/random_model.h"

namespace ebb::scope_trail_test {
namespace {

constexpr int kDeclared = 12;

// As the engine follows a declared order 0 1 2 ...: after a scope the next one is expected, or the
// one that was expected anyway.
ScopeTrail TrailOf(const std::vector<int>& codes) {
  ScopeTrail trail{.next = 0};
  int next = 0;
  const auto code = [](int scope) { return scope < kDeclared ? scope : ScopeTrail::kNothing; };
  for (int opened : codes) {
    const int expected = next;
    next = std::max(next, opened + 1);
    trail.Open(opened, code(expected), code(next));
  }
  return trail;
}

std::vector<int> RandomCodes(sharding::Random& random, int off_plan_in_ten) {
  std::vector<int> codes;
  for (int64_t left = random.Between(0, kDeclared); left > 0; --left) {
    const int next = codes.empty() ? 0 : codes.back() + 1;
    codes.push_back(random.Between(0, 9) < off_plan_in_ten
                        ? static_cast<int>(random.Between(0, kDeclared - 1))
                        : std::min(next, kDeclared - 1));
  }
  return codes;
}

TEST(ScopeTrailTest, NamesTheFirstDifferenceOfLogs) {
  int differ = 0;
  for (uint64_t seed = 1; seed <= 20'000; ++seed) {
    sharding::Random random(seed);
    const std::vector<int> first = RandomCodes(random, static_cast<int>(seed % 4));
    std::vector<int> other = first;
    if (random.Between(0, 3) > 0) other = RandomCodes(random, static_cast<int>(seed % 4));
    size_t at = 0;
    while (at < first.size() && at < other.size() && first[at] == other[at]) ++at;
    const auto difference = FirstDifference(TrailOf(first), TrailOf(other));
    ASSERT_EQ(difference.has_value(), first != other) << "seed " << seed;
    if (!difference) continue;
    ++differ;
    const auto code = [at](const std::vector<int>& codes) {
      return at < codes.size() ? codes[at] : ScopeTrail::kNothing;
    };
    ASSERT_EQ(difference->number, static_cast<int>(at)) << "seed " << seed;
    ASSERT_EQ(difference->first, code(first)) << "seed " << seed;
    ASSERT_EQ(difference->other, code(other)) << "seed " << seed;
  }
  EXPECT_GT(differ, 1'000);
}

TEST(ScopeTrailTest, SeesNoDifferenceInScopesThatItHasNotKept) {
  std::vector<int> first(ScopeTrail::kOffPlanMax + 3, 0), other = first;
  first.push_back(5);
  other.push_back(6);
  EXPECT_FALSE(FirstDifference(TrailOf(first), TrailOf(other)).has_value());
  other[7] = 3;  // but it has the ones before
  const auto difference = FirstDifference(TrailOf(first), TrailOf(other));
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(difference->number, 7);
  EXPECT_EQ(difference->first, 0);
  EXPECT_EQ(difference->other, 3);
}

}  // namespace
}  // namespace ebb::scope_trail_test
