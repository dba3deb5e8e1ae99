// What decides whether all that is on the disk has checksums: a step's bytes from its plan, and the
// share of a step that sums can take.
#include "ebb/runtime/engine/checksum_cost.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "ebb/sharding/traffic.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::checksum_cost_test {
namespace {

TEST(ChecksumCost, AStepGetsLongerByTheSumsShareOfTheSlowerFile) {
  struct Case {
    ChecksumWork work;
    ChecksumRates rates;
    int threads;
    double longer;
  };
  constexpr double kNever = std::numeric_limits<double>::infinity();
  for (const Case& c : {
           Case{{.summed = 0, .parameters = 100, .states = 100}, {}, 1, 0},
           Case{{.summed = 100, .parameters = 100}, {.sum = 10, .parameters = 1}, 1, 0.1},
           Case{{.summed = 100, .parameters = 100}, {.sum = 10, .parameters = 1}, 4, 0.025},
           Case{{.summed = 100, .parameters = 100, .states = 400},
                {.sum = 10, .parameters = 1, .states = 2},
                1,
                0.05},
           Case{{.summed = 100, .parameters = 300, .states = 400},
                {.sum = 10, .parameters = 1, .states = 4},
                1,
                1.0 / 30},
           Case{{.summed = 100, .parameters = 100}, {.sum = 10, .parameters = kNever}, 1, kNever},
       })
    EXPECT_DOUBLE_EQ(LongerAtMost(c.work, c.rates, c.threads), c.longer);
}

// Width 67: units of more than one sub-group.
sharding::Plan PlanFor(const Config& config, bool frozen = true) {
  const ToyModel model({.width = 67, .frozen = frozen, .boundaries = true});
  const absl::StatusOr<Config> resolved = config.ForWorld(1);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  absl::StatusOr<sharding::Plan> plan =
      sharding::PlanStep({.model = &model.spec(), .config = &*resolved, .world = 1});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

int64_t MovedOnNvme(const sharding::Plan& plan, StateClass what) {
  int64_t bytes = 0;
  for (const TrafficRow& row : sharding::PredictTraffic(plan)) {
    if (row.tier == Tier::kNvme && row.state == what)
      bytes += static_cast<int64_t>(row.predicted_bytes);
  }
  return bytes;
}

TEST(ChecksumCost, CountsTheBytesThatAStepMovesOfEachClass) {
  for (const Timing timing : {Timing::kLate, Timing::kEarly}) {
    for (const bool gradients : {false, true}) {
      Config config = OnNvme(ConfigFor({.stage = 3, .timing = timing}), "/disk");
      config.compute = DType::kBFloat16;
      if (gradients) config.ebb.offload_gradients = config.ebb.offload_activations = Tier::kNvme;
      const sharding::Plan plan = PlanFor(config);
      const ChecksumWork work = ChecksumWorkOf(plan, sharding::LayOutSwapFiles(plan));
      const int64_t parameters = MovedOnNvme(plan, StateClass::kParameter),
                    others = MovedOnNvme(plan, StateClass::kGradient) +
                             MovedOnNvme(plan, StateClass::kActivation);
      EXPECT_EQ(others > 0, gradients);
      EXPECT_EQ(work.parameters, parameters);
      EXPECT_EQ(work.states, others + MovedOnNvme(plan, StateClass::kMaster) +
                                 MovedOnNvme(plan, StateClass::kOptimizer));
      // With early updates, also the masters that a visit casts.
      int64_t masters = 0;
      for (const sharding::Operation& operation : plan.operations) {
        if (operation.kind != sharding::OperationKind::kCastMasters) continue;
        for (const sharding::UpdateDetail& of : operation.updates)
          masters += 4 * plan.pools.placement.sub_groups[static_cast<size_t>(of.sub_group)].count();
      }
      EXPECT_EQ(timing == Timing::kEarly, masters > 0);
      EXPECT_EQ(work.summed, parameters + others + masters);
    }
  }
}

// Parameters that are half of the masters have sums with "states". Frozen parameters have none.
TEST(ChecksumCost, SplitMastersLeaveFrozenParametersToSum) {
  Config config = OnNvme(ConfigFor({.stage = 3}), "/disk");
  config.compute = DType::kBFloat16;
  config.ebb.split_master = true;
  const auto work_of = [](const sharding::Plan& plan) {
    return ChecksumWorkOf(plan, sharding::LayOutSwapFiles(plan));
  };
  EXPECT_EQ(work_of(PlanFor(config, /*frozen=*/false)).summed, 0);
  const ChecksumWork work = work_of(PlanFor(config));
  EXPECT_GT(work.summed, 0);
  EXPECT_LT(work.summed, work.parameters / 10);
}

}  // namespace
}  // namespace ebb::testing::checksum_cost_test
