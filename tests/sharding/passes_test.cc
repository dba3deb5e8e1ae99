#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ebb/sharding/decisions.h"
#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/passes/reduction.h"
#include "passes_of.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::passes_test {
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

constexpr int kUnits = 6;

ModelSpec Chain() {
  return UnitChain(std::vector<int64_t>(kUnits, 50'000));
}

// All on NVMe, with two slots for parameters.
Config OnNvme(bool early) {
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.gradient_clipping = early ? 0 : 1;
  config.ebb.check_overflow = !early;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.offload_param.buffer_count = 2;
  return config;
}

PlanInputs InputsOf(const ModelSpec& model, const Config& config) {
  return {.model = &model, .config = &config, .world = 1, .optimizer_states = 2};
}

// A round in the middle always reads parameters, and only some updates can use them.
TEST(SwapIns, ReadsThatTheRoundBeforeIssuesAheadShareParametersOnly) {
  for (const bool split : {false, true}) {
    const ModelSpec model = Chain();
    Config config = OnNvme(/*early=*/true);
    config.zero.offload_param.buffer_count = 2 * kUnits;
    config.ebb.split_master = split;
    const auto shared_of = [&](int64_t rounds) {
      config.gradient_accumulation_steps = rounds;
      const PassesOf passes(InputsOf(model, config));
      size_t shared = 0;
      for (const SwapIn& swap_in : passes.swap_ins.reads) shared += swap_in.shared.size();
      return shared;
    };
    if (split) {
      EXPECT_EQ(shared_of(5), shared_of(1));
    } else {
      EXPECT_LT(shared_of(5), shared_of(1));
    }
  }
}

// If all parameters fit into RAM, none is on the disk, even if the config names one.
TEST(CarriedUpdates, AreOfParametersOnNvmeAlone) {
  const ModelSpec model = Chain();
  Config config = OnNvme(/*early=*/false);
  for (const bool fits : {false, true}) {
    config.zero.offload_param.max_in_cpu = fits ? 1'000'000'000 : 0;
    ASSERT_OK_AND_ASSIGN(const Plan step, PlanStep(InputsOf(model, config)));
    EXPECT_EQ(step.carries_updates, !fits);
  }
}

}  // namespace
}  // namespace ebb::sharding::passes_test
