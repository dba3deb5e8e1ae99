#include "ebb/sharding/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/placement.h"
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

absl::StatusOr<Pools> LaidOut(const Config& config,
                              const std::vector<int64_t>& units = std::vector<int64_t>(4, kMebi)) {
  const ModelSpec model = UnitChain(units);
  auto plan = PlanStep({.model = &model, .config = &config, .world = 1, .optimizer_states = 2});
  if (!plan.ok()) return plan.status();
  return plan->pools;
}

std::vector<int64_t> Counts(const StatePlacement& placement) {
  std::vector<int64_t> counts;
  for (const SubGroup& group : placement.sub_groups) counts.push_back(group.count());
  return counts;
}
int64_t StatesInRam(const StatePlacement& placement) {
  int64_t bytes = 0;
  for (const SubGroup& group : placement.sub_groups)
    bytes += group.tier == Tier::kCpu ? group.count() * 12 : 0;
  return bytes;
}

// A slot for each of five reads of 2 MiB. Four work slots, with masters, moments and gradients (16
// bytes), fit within four buffers of one unit in fp32: 16 Mi / 64 elements, rounded down to a whole
// cut.
TEST(Budget, PoolSizesAreUpperLimits) {
  const Config config = AllOnNvme();
  const auto pools = LaidOut(config);
  ASSERT_TRUE(pools.ok()) << pools.status();
  EXPECT_EQ(pools->parameter_slots.count, 5);
  EXPECT_EQ(pools->parameter_slots.bytes, 2 * kMebi);
  const int64_t quarter = 16 * kMebi / 64 / kCutElements * kCutElements;
  EXPECT_EQ(pools->placement.units[0].sub_groups, 4);
  EXPECT_EQ(Counts(pools->placement).front(), quarter);
  EXPECT_EQ(pools->host_work.ring.count, 4);
}

TEST(Budget, FewerOrSmallerBuffersMakeFewerSlotsAndSmallerSubGroups) {
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_count = 2;
  config.zero.offload_optimizer.buffer_count = 1;
  config.zero.sub_group_size = kMebi;
  const auto pools = LaidOut(config);
  ASSERT_TRUE(pools.ok()) << pools.status();
  EXPECT_EQ(pools->parameter_slots.count, 2);
  EXPECT_EQ(Counts(pools->placement).front(), 4 * kMebi / 64 / kCutElements * kCutElements);
  config.zero.sub_group_size = 3 * kCutElements;
  EXPECT_THAT(Counts(LaidOut(config)->placement), Each(::testing::Le(3 * kCutElements)));
}

// Their product would not be a number of bytes.
TEST(Budget, AnyNumberOfBuffersOfAnySizeIsALimit) {
  const std::vector<int64_t> units = {int64_t{1} << 31};
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_size.reset();
  config.zero.sub_group_size = int64_t{1} << 40;
  const auto usual = LaidOut(config, units);
  ASSERT_TRUE(usual.ok()) << usual.status();
  config.zero.offload_optimizer.buffer_count = (int64_t{1} << 31) - 1;
  const auto pools = LaidOut(config, units);
  ASSERT_TRUE(pools.ok()) << pools.status();
  EXPECT_EQ(pools->placement.sub_groups.size(), usual->placement.sub_groups.size());
  EXPECT_EQ(pools->host_work.ring.bytes, usual->host_work.ring.bytes);
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
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("buffer_size is 1048575 elements"), HasSubstr("unit 'unit0'"),
                    HasSubstr("raise it to at least 1048576"), HasSubstr("max_in_cpu")));
  config.zero.offload_param.max_in_cpu = 4 * kMebi;  // nothing of it is on the disk
  EXPECT_TRUE(LaidOut(config).ok());
}

// DeepSpeed's default is of a parameter, and a unit has many of them.
TEST(Budget, WithoutABufferSizeASlotHoldsTheLargestUnitWhateverItsSize) {
  Config config = AllOnNvme();
  config.zero.offload_param.buffer_size.reset();
  const std::vector<int64_t> units = {kMebi, 192 * kMebi, kMebi};
  EXPECT_EQ(LaidOut(config, units)->parameter_slots.bytes, 2 * 192 * kMebi);
  // What is gathered together still shares no more than the default, or the largest unit.
  config.ebb.coalesce_bytes = int64_t{1} << 40;
  EXPECT_EQ(LaidOut(config, units)->parameter_slots.bytes, 2 * 192 * kMebi);
  EXPECT_EQ(LaidOut(config, {60 * kMebi, 30 * kMebi, 60 * kMebi})->parameter_slots.bytes,
            2 * 90 * kMebi);
  config.zero.offload_param.buffer_size = 100'000'000;
  EXPECT_EQ(LaidOut(config, units).status().code(), absl::StatusCode::kInvalidArgument);
}

// Four units would be gathered as one: of 2 Mi elements a buffer has room for two.
TEST(Budget, UnitsThatAreGatheredTogetherShareABuffer) {
  Config config = AllOnNvme();
  config.ebb.coalesce_bytes = int64_t{1} << 30;
  config.zero.offload_param.buffer_size = 2 * kMebi;
  EXPECT_EQ(LaidOut(config)->parameter_slots.bytes, 2 * 2 * kMebi);
  config.zero.offload_param.buffer_size = 2 * kMebi - 1;
  EXPECT_EQ(LaidOut(config)->parameter_slots.bytes, 2 * kMebi);
  config.zero.offload_param.buffer_size = 4 * kMebi;
  EXPECT_EQ(LaidOut(config)->parameter_slots.bytes, 4 * 2 * kMebi);
}

TEST(Budget, StatesFillTheRestOfHostMemory) {
  Config config = AllOnNvme();
  const auto least = LaidOut(config);
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_EQ(StatesInRam(least->placement), 0);
  const int64_t staging = HostBytes(*least);
  config.ebb.host_memory = staging;
  EXPECT_EQ(StatesInRam(LaidOut(config)->placement), 0);
  config.ebb.host_memory = staging + 24 * kMebi;  // half of the states
  const auto half = LaidOut(config);
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_LE(HostBytes(*half), *config.ebb.host_memory);
  EXPECT_LE(StatesInRam(half->placement), 24 * kMebi);
  EXPECT_GT(StatesInRam(half->placement), 20 * kMebi);  // but for a sub-group of 4 MiB
  config.ebb.host_memory = staging + 48 * kMebi;
  EXPECT_EQ(StatesInRam(LaidOut(config)->placement), 48 * kMebi);
}

// Without the slots through which they would pass, so that there is room sooner than it seems.
TEST(Budget, WhereAllStatesFitInRamNoneIsOnTheDisk) {
  Config config = AllOnNvme();
  const int64_t staging = HostBytes(*LaidOut(config));
  config.ebb.host_memory = int64_t{1} << 40;
  const auto roomy = LaidOut(config);
  ASSERT_TRUE(roomy.ok()) << roomy.status();
  EXPECT_EQ(StatesInRam(roomy->placement), 48 * kMebi);
  ASSERT_LT(HostBytes(*roomy), staging + 48 * kMebi);
  config.ebb.host_memory = HostBytes(*roomy);
  EXPECT_EQ(StatesInRam(LaidOut(config)->placement), 48 * kMebi);
  // Fewer slots of parameters before states on the disk.
  config.ebb.host_memory = HostBytes(*roomy) - 1;
  const auto tight = LaidOut(config);
  ASSERT_TRUE(tight.ok()) << tight.status();
  EXPECT_EQ(StatesInRam(tight->placement), 48 * kMebi);
  EXPECT_LT(tight->parameter_slots.count, roomy->parameter_slots.count);
}

TEST(Budget, LessHostMemoryMakesSubGroupsSmallerAndThenSlotsFewer) {
  Config config = AllOnNvme();
  const int64_t wanted = HostBytes(*LaidOut(config));
  config.ebb.host_memory = wanted - 1;
  const auto less = LaidOut(config);
  ASSERT_TRUE(less.ok()) << less.status();
  EXPECT_EQ(less->parameter_slots.count, 5);
  EXPECT_LT(Counts(less->placement).front(), 16 * kMebi / 48 / 2 + 1);
  EXPECT_LE(HostBytes(*less), wanted - 1);
  // With the least that is granted: two slots, and sub-groups of 64 Ki elements.
  int64_t refused = 0, granted = wanted;
  while (granted - refused > 1) {
    config.ebb.host_memory = refused + (granted - refused) / 2;
    (LaidOut(config).ok() ? granted : refused) = *config.ebb.host_memory;
  }
  config.ebb.host_memory = granted;
  const auto least = LaidOut(config);
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_EQ(least->parameter_slots.count, 2);
  EXPECT_LE(Counts(least->placement).front(), int64_t{1} << 16);
  EXPECT_EQ(HostBytes(*least), granted);
}

// Whatever asks for small ones: sub_group_size, or what host_memory leaves to staging.
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
      const auto pools = PlanPools(inputs);
      ASSERT_TRUE(pools.ok()) << pools.status();
      const std::vector<int64_t> counts = Counts(pools->placement);
      EXPECT_LE(counts.size(), static_cast<size_t>(kSubGroupsMax + 2));
      EXPECT_EQ(counts.front() % kCutElements, 0);
    }
  }
}

TEST(Budget, SizesOfAnyMagnitudeAreShown) {
  EXPECT_EQ(Megabytes(0), "0.0 MiB");
  EXPECT_EQ(Megabytes(1), "1 byte");
  EXPECT_EQ(Megabytes(1023), "1023 bytes");
  EXPECT_EQ(Megabytes(1536), "1.5 KiB");
  EXPECT_EQ(Megabytes(100 << 10), "100.0 KiB");
  EXPECT_EQ(Megabytes(kMebi / 2), "0.5 MiB");
}

TEST(Budget, ACapThatCannotBeKeptIsAnErrorWithTheTableAndARemedy) {
  Config config = AllOnNvme();
  config.ebb.host_memory = 4096;
  config.ebb.device_memory = DeviceBytes(*LaidOut(AllOnNvme()));
  const absl::Status host = LaidOut(config).status();
  EXPECT_EQ(host.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(host.message()),
              AllOf(HasSubstr("ebb.host_memory is 4.0 KiB a rank"), HasSubstr("staging "),
                    HasSubstr("no setting fits; the least, ")));
  config = AllOnNvme();
  const int64_t device = DeviceBytes(*LaidOut(config));
  config.ebb.device_memory = device;
  EXPECT_TRUE(LaidOut(config).ok());
  config.ebb.device_memory = device - 1;
  const absl::Status refused = LaidOut(config).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("ebb.device_memory is "), HasSubstr("gather "),
                    HasSubstr("; {\"ebb\": {\"prefetch_depth\": 0}} would fit (")));
}

}  // namespace
}  // namespace ebb::sharding::budget_test
