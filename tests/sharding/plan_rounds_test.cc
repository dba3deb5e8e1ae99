// Plans of many rounds, which must not take long to make, nor much memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_table.h"
#include "ebb/sharding/waits.h"
#include "unit_chain.h"

namespace ebb::sharding {
namespace {

using ::testing::ElementsAreArray;

// Also of as many rounds and units as a large batch on a deep model has, which is planned at once
// only if no moment looks back over all before it.
TEST(PlanOfRounds, EveryRoundInTheMiddleIsTheOneBeforeItAgain) {
  constexpr int kRounds = 4'096, kUnits = 12;
  const ModelSpec model = UnitChain(std::vector<int64_t>(kUnits, 64), /*output_bytes=*/1'000);
  for (const Tier tier : {Tier::kDevice, Tier::kCpu}) {
    Config config;
    config.gradient_accumulation_steps = kRounds;
    config.zero.stage = 3;
    config.zero.param_persistence_threshold = 0;
    config.zero.reduce_bucket_size = 1;
    config.ebb.coalesce_bytes = 0;
    config.zero.offload_param.device = config.zero.offload_optimizer.device = tier;
    config.ebb.offload_activations = tier;
    const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
    const absl::StatusOr<Plan> plan = PlanStep(inputs);
    ASSERT_TRUE(plan.ok()) << plan.status();
    // A round has an opening and a closing for each scope. Rounds behind the first wait for the same, a
    // round later: as instructions, of which kernels are some.
    Fragment fragment = Lower(*plan, /*carrying=*/false);
    const Fragment* const only[] = {&fragment};
    DeriveWaits(Cells(only, kUnits, plan->decisions.shards), fragment);
    constexpr size_t kMoments = 4 * kUnits;
    const auto first = [&](int round) {
      return fragment.moments[2 + kMoments * static_cast<size_t>(round)].begin;
    };
    const int period = first(3) - first(2);
    const auto shifted = [&](std::span<const int> waits, int rounds) {
      std::vector<int> later(waits.begin(), waits.end());
      for (int& wait : later) wait += rounds * period;
      return ElementsAreArray(later);
    };
    for (int round = 3; round < kRounds - 2; ++round) {
      ASSERT_EQ(first(round) - first(round - 1), period) << round;
      for (int i = 0; i < period; ++i) {
        const Instruction& now = fragment.instructions[static_cast<size_t>(first(round) + i)];
        const Instruction& before = fragment.instructions[static_cast<size_t>(first(2) + i)];
        ASSERT_EQ(now.role, before.role) << i << " of round " << round;
        ASSERT_THAT(now.waits, shifted(before.waits, round - 2)) << i << " of round " << round;
      }
    }
  }
}

// Lists that come again in every round take no more memory: here all units are gathered at once, and
// uploaded for it.
TEST(PlanOfRounds, KeepsListsThatComeAgainOnce) {
  constexpr int kUnits = 64;
  const ModelSpec model = UnitChain(std::vector<int64_t>(kUnits, 64));
  Config config;
  config.gradient_accumulation_steps = 512;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.offload_param.device = Tier::kCpu;
  const absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::set<const Move*> lists;
  int uploads = 0;
  for (const Operation& operation : plan->operations) {
    if (operation.kind != OperationKind::kUpload) continue;
    ++uploads;
    lists.insert(operation.moves.data());
    EXPECT_GT(operation.moves.size(), 8u);
  }
  EXPECT_GE(uploads, 1024);
  EXPECT_LE(lists.size(), 16u);
  EXPECT_GT(plan->OwnBytes(), static_cast<int64_t>(plan->operations.size() * sizeof(Operation)));
}

TEST(PlanOfRounds, CopyHasListsOfItsOwnPlan) {
  const ModelSpec model = UnitChain({64, 64});
  const Config config;
  absl::StatusOr<Plan> plan = PlanStep({.model = &model, .config = &config});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::string table = PlanTable(*plan);
  const Plan copy = *plan;
  plan = absl::CancelledError();
  EXPECT_EQ(PlanTable(copy), table);
}

}  // namespace
}  // namespace ebb::sharding
