#include "ebb/sharding/reduction.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "ebb/sharding/decisions.h"
#include "random_model.h"

namespace ebb::sharding::reduction_test {
namespace {

struct Case {
  explicit Case(uint64_t seed) : random_case(seed, /*offloads=*/false, /*orders=*/seed % 3 == 0) {
    const PlanInputs inputs = random_case.inputs();
    layout = *LayOut(random_case.model, random_case.world);
    decisions = *Decide(inputs, layout, 0, false);
    scopes = ScopesOfStep(random_case.model, decisions.rounds);
    group_bytes = ReduceGroupBytes(random_case.config);
    reduction = PlanReduction(scopes, layout, decisions,
                              static_cast<int>(random_case.model.forward.size()), group_bytes);
  }
  int64_t bytes(int scope) const {
    return layout.units[scopes[scope].unit].trainable.elements * SizeOf(decisions.communication);
  }

  RandomCase random_case;
  ModelLayout layout;
  Decisions decisions;
  std::vector<PlannedScope> scopes;
  int64_t group_bytes = 0;
  Reduction reduction;
};

TEST(Reduction, AGroupIsOfOneRoundWithinTheLimitAndHasAUnitOnce) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const Case c(seed);
    SCOPED_TRACE(c.random_case.description());
    int before = -1;  // tick
    for (int g = 0; g < std::ssize(c.reduction.groups); ++g) {
      const std::vector<int>& group = c.reduction.groups[g];
      int64_t bytes = 0;
      std::vector<int> times(c.layout.units.size(), 0);
      for (int s : group) {
        ASSERT_TRUE(c.scopes[s].gradients) << s;
        ASSERT_GT(c.scopes[s].close_tick, before) << "in the order in which scopes close";
        before = c.scopes[s].close_tick;
        ASSERT_EQ(c.reduction.group_of_scope[s], g);
        ASSERT_EQ(c.scopes[s].round, c.scopes[group.front()].round);
        ASSERT_EQ(++times[c.scopes[s].unit], 1);
        bytes += c.bytes(s);
      }
      ASSERT_TRUE(group.size() == 1 || bytes <= c.group_bytes);
    }
  }
}

// So that the reduction runs beside the next scope's backward instead of before it.
TEST(Reduction, AGradientKeepsItsMemoryWhileTheScopeAfterItsGroupIsOpen) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const Case c(seed);
    SCOPED_TRACE(c.random_case.description());
    for (const std::vector<int>& group : c.reduction.groups) {
      const int next = std::min<int>(c.scopes[group.back()].close_tick + 2,
                                     2 * static_cast<int>(c.scopes.size()));
      for (int s : group) {
        bool is_kept = false;
        for (const Lifetime& life : c.reduction.lifetimes[GradientKey(c.decisions, c.scopes[s])])
          is_kept |= life.begin <= c.scopes[s].open_tick && life.end >= next;
        ASSERT_TRUE(is_kept) << "scope " << s;
      }
    }
  }
}

TEST(Reduction, AnAccumulatorOfAStepLivesFromTheFirstRound) {
  int accumulators = 0;
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const Case c(seed);
    SCOPED_TRACE(c.random_case.description());
    if (!c.decisions.keeps_step_gradients) continue;
    for (int s = 0; s < std::ssize(c.scopes); ++s) {
      const PlannedScope& scope = c.scopes[s];
      if (!scope.gradients || scope.round > 0) continue;
      const std::vector<Lifetime>& lives = c.reduction.lifetimes[scope.visit];
      ASSERT_EQ(lives.size(), 1u);
      ASSERT_EQ(lives.front().begin, c.scopes[s].open_tick);
      ++accumulators;
    }
  }
  EXPECT_GT(accumulators, 0);
}

}  // namespace
}  // namespace ebb::sharding::reduction_test
