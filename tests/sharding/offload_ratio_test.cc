#include "ebb/sharding/offload_ratio.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ebb/sharding/memory_model.h"
#include "random_model.h"
#include "unit_chain.h"

namespace ebb::sharding::offload_ratio_test {
namespace {

constexpr int64_t kMebi = int64_t{1} << 20;

double HundredthBelow(double ratio) {
  return std::round(ratio * 100 - 1) / 100;
}

TEST(BalancedRatio, IsTheHostsShareOfBothRates) {
  EXPECT_EQ(BalancedRatio({.device = 3, .host = 1, .copies = 9}), 0.25);
  EXPECT_EQ(BalancedRatio({.device = 1, .host = 3, .copies = 9}), 0.75);
  EXPECT_EQ(BalancedRatio({.device = 3, .host = 9, .copies = 1}), 0.25);  // copies hold it up
}

TEST(BalancedRatio, LetsBothPartsEndTogether) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    const auto rate = [&] {
      return std::pow(10, static_cast<double>(random.Between(30, 130)) / 10);
    };
    const UpdateRates rates = {.device = rate(), .host = rate(), .copies = rate()};
    const double ratio = BalancedRatio(rates);
    EXPECT_GT(ratio, 0);
    EXPECT_LT(ratio, 1);
    const double below = ratio / std::min(rates.host, rates.copies);
    EXPECT_NEAR(below / ((1 - ratio) / rates.device), 1, 1e-6);
    // What is faster has more of it.
    for (const double factor : {1.5, 10.0}) {
      UpdateRates other = rates;
      other.device *= factor;
      EXPECT_LT(BalancedRatio(other), ratio);
      other = rates;
      other.host *= factor;
      EXPECT_GE(BalancedRatio(other), ratio);
      other.copies *= factor;
      EXPECT_GT(BalancedRatio(other), ratio);
    }
  }
}

// Four units of 1 Mi elements on one rank, in 64 sub-groups.
class ChooseRatioTest : public ::testing::Test {
 protected:
  ChooseRatioTest() {
    config_.compute = DType::kBFloat16;
    config_.gradient_accumulation_steps = 1;
    config_.zero.stage = 1;
    config_.zero.sub_group_size = kMebi / 16;
    config_.zero.offload_optimizer.device = Tier::kCpu;
  }
  PlanInputs inputs() const {
    return {.model = &model_, .config = &config_, .world = 1, .optimizer_states = 2};
  }
  int64_t BytesWith(double ratio, Tier tier = Tier::kDevice) const {
    Config config = config_;
    config.ebb.device_memory.reset();
    config.ebb.host_memory.reset();
    config.zero.offload_optimizer.ratio = ratio;
    PlanInputs of_config = inputs();
    of_config.config = &config;
    return BytesOn(tier, *PlanStep(of_config));
  }

  const ModelSpec model_ = UnitChain(std::vector<int64_t>(4, kMebi));
  Config config_;
};

TEST_F(ChooseRatioTest, WithoutABoundItIsTheBalanceInHundredths) {
  for (const auto& [balanced, ratio] : std::vector<std::pair<double, double>>{
           {0, 0}, {0.004, 0}, {0.006, 0.01}, {0.25, 0.25}, {0.333, 0.33}, {0.999, 1}, {1, 1}}) {
    EXPECT_EQ(ChooseRatio(inputs(), balanced, std::nullopt), ratio) << balanced;
    EXPECT_EQ(ChooseRatio(inputs(), balanced, int64_t{1} << 40), ratio) << balanced;
  }
}

TEST_F(ChooseRatioTest, IsRaisedUntilTheDeviceHoldsTheRest) {
  const int64_t bound = BytesWith(0.5);
  const double least = ChooseRatio(inputs(), 0, bound);
  EXPECT_GT(least, 0.4);
  EXPECT_LE(least, 0.5);
  EXPECT_LE(BytesWith(least), bound);
  EXPECT_GT(BytesWith(HundredthBelow(least)), bound);
  EXPECT_EQ(ChooseRatio(inputs(), 0.3, bound), least);
  EXPECT_EQ(ChooseRatio(inputs(), 0.8, bound), 0.8);
  EXPECT_LT(ChooseRatio(inputs(), 0, bound + 4 * kMebi), least);
}

TEST_F(ChooseRatioTest, WhereNoRatioFitsThePlanReportsTheLack) {
  config_.ebb.device_memory = BytesWith(1) - 1;
  config_.zero.offload_optimizer.ratio = ChooseRatio(inputs(), 0, config_.ebb.device_memory);
  EXPECT_EQ(config_.zero.offload_optimizer.ratio, 1);
  EXPECT_EQ(PlanStep(inputs()).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ChooseRatioTest, TheHostsMemoryBoundsTheBalanceButNotTheNeedOfTheDevice) {
  config_.ebb.host_memory = BytesWith(0.6, Tier::kCpu);
  EXPECT_EQ(ChooseRatio(inputs(), 0.55, std::nullopt), 0.55);
  EXPECT_EQ(ChooseRatio(inputs(), 0.9, std::nullopt), 0);
  const int64_t bound = BytesWith(0.5);
  const double least = ChooseRatio(inputs(), 0, bound);
  EXPECT_EQ(ChooseRatio(inputs(), 0.9, bound), least);
  // Between both there is nothing.
  config_.ebb.device_memory = BytesWith(0.8);
  config_.zero.offload_optimizer.ratio = ChooseRatio(inputs(), 0, config_.ebb.device_memory);
  EXPECT_EQ(PlanStep(inputs()).status().code(), absl::StatusCode::kResourceExhausted);
}

// Otherwise the plan would report a lack on the device instead of the host.
TEST_F(ChooseRatioTest, TheNeedOfTheDeviceDoesNotDependOnTheHost) {
  const int64_t bound = BytesWith(0.8);
  const double asked = ChooseRatio(inputs(), 0, bound);
  for (const double held : {0.0, 0.3, 0.7}) {
    config_.ebb.host_memory = BytesWith(held, Tier::kCpu) + 4096;
    EXPECT_EQ(ChooseRatio(inputs(), 0, bound), asked) << held;
    EXPECT_EQ(ChooseRatio(inputs(), 0.9, bound), asked) << held;
  }
}

TEST_F(ChooseRatioTest, WhereStatesStayOnTheDeviceItIsAllThatIsOffloaded) {
  config_.zero.offload_optimizer.device = Tier::kDevice;
  EXPECT_EQ(ChooseRatio(inputs(), 0.5, 1), 1);
  config_.zero.offload_optimizer.device = Tier::kCpu;
  config_.zero.stage = 0;
  EXPECT_EQ(ChooseRatio(inputs(), 0.5, 1), 1);
}

// For any plan: the chosen ratio fits, and a hundredth less would not.
TEST(ChooseRatio, IsTheLeastOfItsNeighbours) {
  int raised = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    RandomCase random_case(seed, /*offloads=*/true);
    random_case.config.ebb.host_memory.reset();
    if (random_case.config.optimizer_tier() == Tier::kDevice) continue;
    SCOPED_TRACE(random_case.description());
    const auto bytes = [&](double ratio) {
      random_case.config.zero.offload_optimizer.ratio = ratio;
      const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
      return plan.ok() ? BytesOn(Tier::kDevice, *plan) : -1;
    };
    const int64_t all = bytes(1), none = bytes(0);
    if (all < 0) continue;
    for (const int64_t bound : {all - 1, all, (all + none) / 2, none}) {
      for (const double balanced : {0.0, 0.37}) {
        const double ratio = ChooseRatio(random_case.inputs(), balanced, bound);
        EXPECT_GE(ratio, balanced);
        if (ratio < 1) {
          EXPECT_LE(bytes(ratio), bound);
        }
        if (ratio == balanced) continue;
        EXPECT_GT(bytes(HundredthBelow(ratio)), bound);
        ++raised;
      }
    }
  }
  EXPECT_GT(raised, 100);
}

}  // namespace
}  // namespace ebb::sharding::offload_ratio_test
