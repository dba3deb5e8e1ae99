#include "ebb/sharding/fit/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ebb/sharding/fit/offload_ratio.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/placement.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::budget_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kMebi = int64_t{1} << 20;

// Four units of 1 Mi elements on one rank, bf16 and AdamW, all on NVMe: 2 MiB of parameters and 12
// of states a unit. Updates are held until Finish, so nothing is carried.
Config AllOnNvme() {
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.ebb.coalesce_bytes = 0;
  config.ebb.asynchronous_step = AsynchronousStep::kOff;
  config.zero.offload_param = {
      .device = Tier::kNvme, .nvme_paths = {"/disk"}, .buffer_size = kMebi, .max_in_cpu = 0};
  config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  return config;
}

absl::StatusOr<Table> LaidOut(const Config& config,
                              const std::vector<int64_t>& units = std::vector<int64_t>(4, kMebi)) {
  const ModelSpec model = UnitChain(units);
  auto plan = PlanStep({.model = &model, .config = &config, .world = 1, .optimizer_states = 2});
  if (!plan.ok()) return plan.status();
  return plan->table;
}

// A ring of slots in host memory.
const Array& SlotsOf(const Table& table, Purpose purpose) {
  return table[table.Find(purpose, FactsOf(purpose).of == ArrayOf::kTier ? 1 : 0)];
}
int64_t ParameterSlotBytes(const Table& table) {
  return SlotsOf(table, Purpose::kParameterSlot).turn_bytes;
}
std::vector<int64_t> Counts(const Table& table) {
  std::vector<int64_t> counts;
  for (const SubGroup& group : table.sub_groups) counts.push_back(group.count());
  return counts;
}
int64_t StatesInRam(const Table& table) {
  int64_t bytes = 0;
  for (const SubGroup& group : table.sub_groups)
    bytes += group.tier == Tier::kCpu ? group.count() * 12 : 0;
  return bytes;
}

// A slot for each of five reads of 2 MiB. Four work slots, with masters, moments and gradients (16
// bytes), fit within four buffers of one unit in fp32: 16 Mi / 64 elements, rounded down to a whole
// cut.
TEST(Budget, PoolSizesAreUpperLimits) {
  const Config config = AllOnNvme();
  ASSERT_OK_AND_ASSIGN(const auto table, LaidOut(config));
  EXPECT_EQ(SlotsOf(table, Purpose::kParameterSlot).turns, 5);
  EXPECT_EQ(SlotsOf(table, Purpose::kParameterSlot).turn_bytes, 2 * kMebi);
  const int64_t quarter = 16 * kMebi / 64 / kCutElements * kCutElements;
  EXPECT_EQ(table.SubGroupsOf(0).size(), 4u);
  EXPECT_EQ(Counts(table).front(), quarter);
  EXPECT_EQ(SlotsOf(table, Purpose::kWorkState).turns, 4);
}

TEST(Budget, FewerOrSmallerBuffersMakeFewerSlotsAndSmallerSubGroups) {
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_count = 2;
  config.zero.offload_optimizer.buffer_count = 1;
  config.zero.sub_group_size = kMebi;
  ASSERT_OK_AND_ASSIGN(const auto table, LaidOut(config));
  EXPECT_EQ(SlotsOf(table, Purpose::kParameterSlot).turns, 2);
  EXPECT_EQ(Counts(table).front(), 4 * kMebi / 64 / kCutElements * kCutElements);
  config.zero.sub_group_size = 3 * kCutElements;
  EXPECT_THAT(Counts(*LaidOut(config)), Each(::testing::Le(3 * kCutElements)));
}

// The product of count and size would not be a number of bytes.
TEST(Budget, AnyNumberOfBuffersOfAnySizeIsALimit) {
  const std::vector<int64_t> units = {int64_t{1} << 31};
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_size.reset();
  config.zero.sub_group_size = int64_t{1} << 40;
  ASSERT_OK_AND_ASSIGN(const auto usual, LaidOut(config, units));
  config.zero.offload_optimizer.buffer_count = (int64_t{1} << 31) - 1;
  ASSERT_OK_AND_ASSIGN(const auto table, LaidOut(config, units));
  EXPECT_EQ(table.sub_groups.size(), usual.sub_groups.size());
  EXPECT_EQ(SlotsOf(table, Purpose::kWorkState).turn_bytes,
            SlotsOf(usual, Purpose::kWorkState).turn_bytes);
}

TEST(Budget, NamesKeysThatTheTrainersOptimizerOverrules) {
  Config config = AllOnNvme();
  EXPECT_EQ(WhatOwnOptimizerOverrules(config), "");
  config.zero.sub_group_size = kMebi;
  EXPECT_THAT(WhatOwnOptimizerOverrules(config),
              AllOf(HasSubstr("\"zero_optimization.sub_group_size\" 1048576 is no limit"),
                    HasSubstr("EngineOptions::optimizer"), HasSubstr("uncut")));
  config.zero.offload_optimizer.buffer_count = 2;
  EXPECT_THAT(
      WhatOwnOptimizerOverrules(config),
      HasSubstr(" and \"zero_optimization.offload_optimizer.buffer_count\" 2 are no limit"));
  config.zero.offload_optimizer.device = Tier::kCpu;  // where it has none
  EXPECT_THAT(WhatOwnOptimizerOverrules(config), ::testing::Not(HasSubstr("buffer_count")));
  config.zero.offload_optimizer.device = config.zero.offload_param.device = Tier::kDevice;
  EXPECT_EQ(WhatOwnOptimizerOverrules(config), "");  // units are updated whole there
}

TEST(Budget, ASliceThatIsLargerThanABufferIsNamed) {
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_size = kMebi - 1;
  const absl::Status status = LaidOut(config).status();
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                        "buffer_size is 1048575 elements", "unit 'unit0'",
                                        "raise it to at least 1048576", "max_in_cpu"));
  config.zero.offload_param.max_in_cpu = 4 * kMebi;  // nothing of it is on the disk
  EXPECT_OK(LaidOut(config));
}

// DeepSpeed's default is of a parameter, and a unit has many of them.
TEST(Budget, WithoutABufferSizeASlotHoldsTheLargestUnitWhateverItsSize) {
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_size.reset();
  const std::vector<int64_t> units = {kMebi, 192 * kMebi, kMebi};
  EXPECT_EQ(ParameterSlotBytes(*LaidOut(config, units)), 2 * 192 * kMebi);
  // Units that are gathered together still share no more than the default, or the largest unit.
  config.ebb.coalesce_bytes = int64_t{1} << 40;
  EXPECT_EQ(ParameterSlotBytes(*LaidOut(config, units)), 2 * 192 * kMebi);
  EXPECT_EQ(ParameterSlotBytes(*LaidOut(config, {60 * kMebi, 30 * kMebi, 60 * kMebi})),
            2 * 90 * kMebi);
  config.zero.offload_param.buffer_size = 100'000'000;
  EXPECT_EQ(LaidOut(config, units).status().code(), absl::StatusCode::kInvalidArgument);
}

// Four units would be gathered as one: of 2 Mi elements a buffer has room for two.
TEST(Budget, UnitsThatAreGatheredTogetherShareABuffer) {
  Config config = AllOnNvme();
  config.ebb.coalesce_bytes = int64_t{1} << 30;
  config.zero.offload_param.buffer_size = 2 * kMebi;
  EXPECT_EQ(ParameterSlotBytes(*LaidOut(config)), 2 * 2 * kMebi);
  config.zero.offload_param.buffer_size = 2 * kMebi - 1;
  EXPECT_EQ(ParameterSlotBytes(*LaidOut(config)), 2 * kMebi);
  config.zero.offload_param.buffer_size = 4 * kMebi;
  EXPECT_EQ(ParameterSlotBytes(*LaidOut(config)), 4 * 2 * kMebi);
}

TEST(Budget, StatesFillTheRestOfHostMemory) {
  Config config = AllOnNvme();
  ASSERT_OK_AND_ASSIGN(const auto least, LaidOut(config));
  EXPECT_EQ(StatesInRam(least), 0);
  const int64_t staging = HostBytes(least.bytes);
  config.ebb.host_memory = staging;
  EXPECT_EQ(StatesInRam(*LaidOut(config)), 0);
  config.ebb.host_memory = staging + 24 * kMebi;  // half of the states
  ASSERT_OK_AND_ASSIGN(const auto half, LaidOut(config));
  EXPECT_LE(HostBytes(half.bytes), *config.ebb.host_memory);
  EXPECT_LE(StatesInRam(half), 24 * kMebi);
  EXPECT_GT(StatesInRam(half), 20 * kMebi);  // but for a sub-group of 4 MiB
  config.ebb.host_memory = staging + 48 * kMebi;
  EXPECT_EQ(StatesInRam(*LaidOut(config)), 48 * kMebi);
}

// Without the slots through which they would pass, so that there is room sooner than it seems.
TEST(Budget, WhereAllStatesFitInRamNoneIsOnTheDisk) {
  Config config = AllOnNvme();
  const int64_t staging = HostBytes(LaidOut(config)->bytes);
  config.ebb.host_memory = int64_t{1} << 40;
  ASSERT_OK_AND_ASSIGN(const auto roomy, LaidOut(config));
  EXPECT_EQ(StatesInRam(roomy), 48 * kMebi);
  ASSERT_LT(HostBytes(roomy.bytes), staging + 48 * kMebi);
  config.ebb.host_memory = HostBytes(roomy.bytes);
  EXPECT_EQ(StatesInRam(*LaidOut(config)), 48 * kMebi);
  // Fewer slots of parameters before states on the disk.
  config.ebb.host_memory = HostBytes(roomy.bytes) - 1;
  ASSERT_OK_AND_ASSIGN(const auto tight, LaidOut(config));
  EXPECT_EQ(StatesInRam(tight), 48 * kMebi);
  EXPECT_LT(SlotsOf(tight, Purpose::kParameterSlot).turns,
            SlotsOf(roomy, Purpose::kParameterSlot).turns);
}

TEST(Budget, LessHostMemoryMakesSubGroupsSmallerAndThenSlotsFewer) {
  Config config = AllOnNvme();
  const int64_t wanted = HostBytes(LaidOut(config)->bytes);
  config.ebb.host_memory = wanted - 1;
  ASSERT_OK_AND_ASSIGN(const auto less, LaidOut(config));
  EXPECT_EQ(SlotsOf(less, Purpose::kParameterSlot).turns, 5);
  EXPECT_LT(Counts(less).front(), 16 * kMebi / 48 / 2 + 1);
  EXPECT_LE(HostBytes(less.bytes), wanted - 1);
  // With the least that is granted: two slots, and sub-groups of 64 Ki elements.
  int64_t refused = 0, granted = wanted;
  while (granted - refused > 1) {
    config.ebb.host_memory = refused + (granted - refused) / 2;
    (LaidOut(config).ok() ? granted : refused) = *config.ebb.host_memory;
  }
  config.ebb.host_memory = granted;
  ASSERT_OK_AND_ASSIGN(const auto least, LaidOut(config));
  EXPECT_EQ(SlotsOf(least, Purpose::kParameterSlot).turns, 2);
  EXPECT_LE(Counts(least).front(), int64_t{1} << 16);
  EXPECT_EQ(HostBytes(least.bytes), granted);
}

// Small sub-groups come of sub_group_size, or of what host_memory leaves to staging.
TEST(Budget, AUnitOfAnySizeIsCutIntoABoundedNumberOfSubGroups) {
  constexpr int64_t kElements = int64_t{3} << 40;
  for (const int64_t sub_group_size : {int64_t{1}, int64_t{1'000'000'000}}) {
    Config config = AllOnNvme();
    config.zero.offload_param.buffer_size.reset();
    config.zero.sub_group_size = sub_group_size;
    for (const bool capped : {false, true}) {
      if (capped) config.ebb.host_memory = kMebi;
      const ModelSpec model = UnitChain({kElements, kElements});
      const PlanInputs inputs{
          .model = &model, .config = &config, .world = 1, .optimizer_states = 2};
      ASSERT_OK_AND_ASSIGN(const auto table, PlanTable(inputs));
      const std::vector<int64_t> counts = Counts(table);
      EXPECT_LE(counts.size(), static_cast<size_t>(kSubGroupsMax + 2));
      EXPECT_EQ(counts.front() % kCutElements, 0);
    }
  }
}

TEST(Budget, SizesOfAnyMagnitudeAreShown) {
  EXPECT_EQ(SizeText(0), "0.0 MiB");
  EXPECT_EQ(SizeText(1), "1 byte");
  EXPECT_EQ(SizeText(1023), "1023 bytes");
  EXPECT_EQ(SizeText(1536), "1.5 KiB");
  EXPECT_EQ(SizeText(100 << 10), "100.0 KiB");
  EXPECT_EQ(SizeText(kMebi / 2), "0.5 MiB");
  EXPECT_EQ(SizeText(1023 * kMebi), "1023.0 MiB");
  EXPECT_EQ(SizeText(1536 * kMebi), "1.50 GiB");
  EXPECT_EQ(SizeText(int64_t{12} << 30), "12.00 GiB");
}

TEST(Budget, ACapThatCannotBeKeptIsAnErrorWithTheTableAndARemedy) {
  Config config = AllOnNvme();
  config.ebb.host_memory = 4096;
  config.ebb.device_memory = DeviceBytes(LaidOut(AllOnNvme())->bytes);
  const absl::Status host = LaidOut(config).status();
  EXPECT_THAT(host, testing::StatusIs(absl::StatusCode::kResourceExhausted,
                                      "ebb.host_memory is 4.0 KiB a rank", "staging ",
                                      "no setting fits; the least, "));
  config = AllOnNvme();
  const int64_t device = DeviceBytes(LaidOut(config)->bytes);
  config.ebb.device_memory = device;
  EXPECT_OK(LaidOut(config));
  config.ebb.device_memory = device - 1;
  const absl::Status refused = LaidOut(config).status();
  EXPECT_THAT(refused,
              testing::StatusIs(absl::StatusCode::kResourceExhausted, "ebb.device_memory is ",
                                "gather ", "; {\"ebb\": {\"prefetch_depth\": 0}} would fit ("));
}

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
    // The faster side gets more of the elements.
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
}  // namespace ebb::sharding::budget_test
