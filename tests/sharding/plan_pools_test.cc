// The memory of plans, over random models, worlds and configs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/rows.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/plan.h"
#include "plan_variants.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_pools_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The ring of slots, or one without bytes.
Array RingOf(const Table& table, Purpose purpose) {
  const int row = table.Find(purpose);
  return row < 0 ? Array{} : table[row];
}

TEST(PlanLaws, EveryVariantHasTheSameTable) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    for (const Variant& variant : variants)
      ASSERT_TRUE(variant.plan.table == variants.front().plan.table);
    ASSERT_OK_AND_ASSIGN(const Plan drain, PlanDrain(random_case.inputs()));
    ASSERT_TRUE(drain.table == variants.front().plan.table);
  }
}

TEST(PlanLaws, AddressesAreAligned) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    for (int row = 0; row < std::ssize(plan.table.rows); ++row) {
      ASSERT_EQ(plan.table[row].turn_bytes % kPoolAlignment, 0);
      for (const Extent& extent : plan.table.ExtentsOf(row)) {
        const bool swaps =
            extent.place.tier == Tier::kNvme ||
            (extent.place.tier == Tier::kCpu && extent.place.pool == StateClass::kStaging);
        ASSERT_EQ(extent.place.offset % (swaps ? kSwapAlignment : kPoolAlignment), 0);
      }
    }
  }
}

// A config may grant a tier exactly the bytes of its pools, and not a page less.
TEST(PlanLaws, PoolsStayWithinWhatTheConfigGrants) {
  for (int seed = 1; seed <= Cases(120); ++seed) {
    RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    const int64_t device = BytesOn(Tier::kDevice, plan), host = BytesOn(Tier::kCpu, plan);
    const OffloadParamConfig& parameters = random_case.config.zero.offload_param;
    const Array slots = RingOf(plan.table, Purpose::kParameterSlot),
                masters = RingOf(plan.table, Purpose::kMasterSlot);
    ASSERT_LE(slots.turns, parameters.buffer_count);
    const int64_t buffer_size = parameters.buffer_size.value_or(100'000'000);
    ASSERT_LE(slots.turn_bytes / SizeOf(random_case.config.compute), buffer_size);
    EbbConfig& ebb = random_case.config.ebb;
    ASSERT_LE(host, ebb.host_memory.value_or(host));
    if (masters.turn_bytes > 0) {
      ASSERT_LE(slots.turns * slots.turn_bytes + masters.turns * masters.turn_bytes,
                parameters.buffer_count * buffer_size * SizeOf(random_case.config.compute));
    }
    ebb.device_memory = device;
    ASSERT_OK(PlanStep(random_case.inputs()));
    ebb.device_memory = device - 1;
    const absl::StatusOr<Plan> refused = PlanStep(random_case.inputs());
    ASSERT_THAT(refused.status(),
                testing::StatusIs(absl::StatusCode::kResourceExhausted, "ebb.device_memory"));
    ebb.device_memory.reset();
    for (const int64_t budget : {host, seed % 2 == 0 ? host / 2 : int64_t{0}}) {
      ebb.host_memory = budget;
      const absl::StatusOr<Plan> granted = PlanStep(random_case.inputs());
      if (granted.ok()) {
        ASSERT_LE(BytesOn(Tier::kCpu, *granted), budget);
      } else {
        ASSERT_LT(budget, host);
        ASSERT_THAT(granted.status(),
                    testing::StatusIs(absl::StatusCode::kResourceExhausted, "ebb.host_memory"));
      }
    }
  }
}

int64_t Aligned(int64_t bytes) {
  return (bytes + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
}

constexpr int kTicks = 30;

std::vector<PoolBlock> RandomBlocks(Random& random) {
  std::vector<PoolBlock> blocks(random.Between(1, 20));
  const int64_t bytes_max = random.OneOf<int64_t>({300, 10'000});
  for (PoolBlock& block : blocks) {
    block.bytes = random.OneIn(8) ? 0 : random.Between(1, bytes_max);
    int begin = static_cast<int>(random.Between(0, kTicks / 2));
    while (begin < kTicks && !random.OneIn(4)) {
      const int end = std::min<int>(kTicks - 1, begin + static_cast<int>(random.Between(0, 8)));
      block.lifetimes.push_back({begin, end});
      begin = end + 1 + static_cast<int>(random.Between(0, 10));
    }
  }
  return blocks;
}

bool LivesAt(const PoolBlock& block, int tick) {
  return std::any_of(block.lifetimes.begin(), block.lifetimes.end(),
                     [&](const Lifetime& life) { return life.begin <= tick && tick <= life.end; });
}

TEST(Pack, NoTwoBlocksOverlapInTimeAndSpace) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<PoolBlock> blocks = RandomBlocks(random);
    const int64_t pool_bytes = Pack(blocks);
    for (int tick = 0; tick < kTicks; ++tick) {
      std::vector<std::pair<int64_t, int64_t>> live;
      for (const PoolBlock& block : blocks) {
        if (block.bytes > 0 && LivesAt(block, tick))
          live.emplace_back(block.offset, block.offset + block.bytes);
      }
      std::sort(live.begin(), live.end());
      for (size_t i = 0; i < live.size(); ++i) {
        ASSERT_EQ(live[i].first % kPoolAlignment, 0);
        ASSERT_GE(live[i].first, i == 0 ? 0 : live[i - 1].second) << "tick " << tick;
        ASSERT_LE(live[i].second, pool_bytes);
      }
    }
  }
}

TEST(Pack, NeedsAtLeastTheBlocksAliveAtOnceAndAtMostTheSum) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<PoolBlock> blocks = RandomBlocks(random);
    const int64_t pool_bytes = Pack(blocks);
    int64_t sum = 0;
    std::vector<int64_t> load(kTicks, 0);
    for (const PoolBlock& block : blocks) {
      if (!block.lifetimes.empty()) sum += Aligned(block.bytes);
      for (int tick = 0; tick < kTicks; ++tick) {
        if (LivesAt(block, tick)) load[tick] += Aligned(block.bytes);
      }
    }
    ASSERT_LE(pool_bytes, sum);
    ASSERT_GE(pool_bytes, *std::max_element(load.begin(), load.end()));
  }
}

TEST(Pack, ABlockOfTheEndsOfAStepSharesItsMemoryWithTheMiddle) {
  std::vector<PoolBlock> blocks = {{.bytes = 10'240, .lifetimes = {{0, 2}, {20, 22}}}};
  for (int i = 0; i < 8; ++i)
    blocks.push_back({.bytes = 1'024, .lifetimes = {{3 + 2 * i, 4 + 2 * i}}});
  EXPECT_EQ(Pack(blocks), 10'240);
}

TEST(Pack, BlocksThatTouchInOneTickDoNotShare) {
  std::vector<PoolBlock> blocks = {{.bytes = 256, .lifetimes = {{0, 3}}},
                                   {.bytes = 256, .lifetimes = {{3, 5}}},
                                   {.bytes = 256, .lifetimes = {{4, 6}}}};
  EXPECT_EQ(Pack(blocks), 512);
}

TEST(Pack, NoBlocksNeedNoMemory) {
  std::vector<PoolBlock> blocks = {{.bytes = 0, .lifetimes = {{0, 3}}},
                                   {.bytes = 100, .lifetimes = {}}};
  EXPECT_EQ(Pack(blocks), 0);
  EXPECT_EQ(Pack({}), 0);
}

// One rank, bf16, AdamW: 12 bytes of states an element.
struct Case {
  std::vector<int64_t> units;
  Tier parameters = Tier::kDevice, optimizer = Tier::kDevice, gradients = Tier::kDevice;
  PlacementLimits limits = {.sub_group_elements = 4 * kCutElements};
  bool own_optimizer = false;
  std::vector<bool> kept_whole = {}, sums_tensor = {};

  StatePlacement Decide() const {
    Decisions decisions;
    decisions.stage = 3;
    decisions.compute = DType::kBFloat16;
    decisions.optimizer_states = 2;
    decisions.own_optimizer = own_optimizer;
    decisions.parameter_tier = parameters;
    decisions.optimizer_tier = optimizer;
    decisions.gradient_tier = gradients;
    decisions.kept_whole = kept_whole.empty() ? std::vector<bool>(units.size()) : kept_whole;
    decisions.sums_tensor = sums_tensor.empty() ? std::vector<bool>(units.size()) : sums_tensor;
    return DecidePlacement(decisions, *LayOut(UnitChain(units), 1), limits);
  }
};

// "unit: begin-end tier", with elements in kCutElements.
std::vector<std::string> SubGroups(const StatePlacement& placement) {
  std::vector<std::string> lines;
  for (const SubGroup& group : placement.sub_groups) {
    lines.push_back(absl::StrCat(group.unit, ": ", group.begin / kCutElements, "-",
                                 group.end / kCutElements, " ", std::string(Name(group.tier))));
  }
  return lines;
}
std::vector<std::string> Pieces(const StatePlacement& placement, size_t unit) {
  std::vector<std::string> lines;
  for (const ParameterPiece& piece : placement.units[unit].trainable) {
    lines.push_back(absl::StrCat(piece.begin / kCutElements, "-", piece.end / kCutElements, " ",
                                 std::string(Name(piece.tier))));
  }
  return lines;
}

constexpr int64_t k = kCutElements;

std::string WhyNoneIsOffloaded(const Config& config) {
  const ModelSpec model = UnitChain({10 * k, 20 * k});
  const auto plan =
      PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
  if (!plan.ok()) return plan.status().ToString();
  return sharding::WhyNoneIsOffloaded(plan->decisions, PlacementOf(plan->table), config);
}

TEST(StatePlacement, ATierThatGetsNoParametersIsNamedWithTheKeyThatKeepsThemOutOfIt) {
  Config config;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  EXPECT_EQ(WhyNoneIsOffloaded(config), "");  // nothing is to leave the device
  config.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  EXPECT_EQ(WhyNoneIsOffloaded(config),
            "\"zero_optimization.offload_param.device\" is \"nvme\", but no unit has more elements "
            "than \"zero_optimization.stage3_param_persistence_threshold\" 100000: all parameters "
            "stay on the device; with 0 none does");
  config.zero.param_persistence_threshold = 10 * k;
  EXPECT_EQ(WhyNoneIsOffloaded(config),
            "\"zero_optimization.offload_param.device\" is \"nvme\", but "
            "\"zero_optimization.offload_param.max_in_cpu\" 1000000000 keeps all parameters that "
            "leave the device in RAM; with 0 none stays there");
  config.zero.offload_param.max_in_cpu = 5 * k;
  EXPECT_EQ(WhyNoneIsOffloaded(config), "");
  config.zero.offload_param.device = Tier::kCpu;
  EXPECT_EQ(WhyNoneIsOffloaded(config), "");
  config.zero.param_persistence_threshold = 20 * k;
  EXPECT_THAT(WhyNoneIsOffloaded(config),
              HasSubstr("device\" is \"cpu\", but no unit has more elements"));
}

TEST(StatePlacement, OnTheDeviceAUnitIsOneSubGroup) {
  const StatePlacement placement = Case{.units = {10 * k, k}}.Decide();
  EXPECT_THAT(SubGroups(placement), ElementsAre("0: 0-10 device", "1: 0-1 device"));
  EXPECT_THAT(Pieces(placement, 0), ElementsAre("0-10 device"));
  EXPECT_EQ(placement.units[1].first_sub_group, 1);
  EXPECT_EQ(placement.units[1].sub_groups, 1);
}

TEST(StatePlacement, BelowTheDeviceUnitsAreCutToSubGroupsThatCrossNone) {
  const StatePlacement placement = Case{.units = {10 * k, 3 * k}, .optimizer = Tier::kCpu}.Decide();
  EXPECT_THAT(SubGroups(placement),
              ElementsAre("0: 0-4 cpu", "0: 4-8 cpu", "0: 8-10 cpu", "1: 0-3 cpu"));
  EXPECT_EQ(placement.units[0].sub_groups, 3);
  EXPECT_EQ(placement.units[1].first_sub_group, 3);
}

TEST(StatePlacement, CutsAreMultiplesOfKCutElementsHoweverSmallASubGroupMayBe) {
  const StatePlacement placement =
      Case{.units = {2 * k}, .optimizer = Tier::kCpu, .limits = {.sub_group_elements = 2 * k - 1}}
          .Decide();
  EXPECT_THAT(SubGroups(placement), ElementsAre("0: 0-1 cpu", "0: 1-2 cpu"));
  const StatePlacement smaller =
      Case{.units = {2 * k}, .optimizer = Tier::kCpu, .limits = {.sub_group_elements = 1}}.Decide();
  EXPECT_EQ(SubGroups(smaller), SubGroups(placement));
}

// 15 k elements stay in RAM, the first units first; a cut within a unit is a multiple of k.
TEST(StatePlacement, TheFirstUnitsParametersAreInRam) {
  const StatePlacement placement = Case{
      .units = {10 * k, 10 * k, 10 * k},
      .parameters = Tier::kNvme,
      .limits = {.sub_group_elements = 4 * k,
                 .parameters_in_cpu =
                     15 * k + 100}}.Decide();
  EXPECT_THAT(Pieces(placement, 0), ElementsAre("0-10 cpu"));
  EXPECT_THAT(Pieces(placement, 1), ElementsAre("0-5 cpu", "5-10 nvme"));
  EXPECT_THAT(Pieces(placement, 2), ElementsAre("0-10 nvme"));
}

// The parameters that a sub-group writes are in one tier, so it ends where a piece does. Sub-groups
// of one piece are equally large.
TEST(StatePlacement, SubGroupsCrossNoPieceOfTheParameters) {
  const StatePlacement placement = Case{
      .units = {10 * k},
      .parameters = Tier::kNvme,
      .optimizer = Tier::kNvme,
      .limits = {
          .sub_group_elements = 4 * k,
          .parameters_in_cpu = 5 * k}}.Decide();
  EXPECT_THAT(SubGroups(placement),
              ElementsAre("0: 0-3 nvme", "0: 3-5 nvme", "0: 5-8 nvme", "0: 8-10 nvme"));
}

TEST(StatePlacement, AnOptimizerOfTheTrainersGetsSlicesUncut) {
  const StatePlacement placement =
      Case{.units = {10 * k},
           .parameters = Tier::kNvme,
           .optimizer = Tier::kCpu,
           .limits = {.sub_group_elements = int64_t{1} << 40, .parameters_in_cpu = 5 * k},
           .own_optimizer = true}
          .Decide();
  EXPECT_THAT(Pieces(placement, 0), ElementsAre("0-10 nvme"));
  EXPECT_THAT(SubGroups(placement), ElementsAre("0: 0-10 cpu"));
}

// Their gradients come last, and their forwards first.
TEST(StatePlacement, TheDevicesShareOfTheStatesIsThatOfTheFirstUnits) {
  const StatePlacement placement = Case{
      .units = {4 * k, 4 * k},
      .optimizer = Tier::kCpu,
      .limits = {
          .sub_group_elements = k,
          .states_on_device = 0.7}}.Decide();
  EXPECT_THAT(SubGroups(placement),
              ElementsAre("0: 0-1 device", "0: 1-2 device", "0: 2-3 device", "0: 3-4 device",
                          "1: 0-1 device", "1: 1-2 cpu", "1: 2-3 cpu", "1: 3-4 cpu"));
  const StatePlacement all = Case{.units = {2 * k},
                                  .optimizer = Tier::kCpu,
                                  .limits = {.sub_group_elements = k, .states_on_device = 1}}
                                 .Decide();
  EXPECT_THAT(SubGroups(all), ElementsAre("0: 0-1 device", "0: 1-2 device"));
}

// 4 sub-groups of k elements of 12 bytes; bytes for two of them.
TEST(StatePlacement, RamsShareOfTheStatesIsSpreadEvenly) {
  const StatePlacement placement = Case{
      .units = {4 * k},
      .optimizer = Tier::kNvme,
      .limits = {.sub_group_elements = k,
                 .states_in_cpu_bytes =
                     2 * 12 * k}}.Decide();
  EXPECT_THAT(SubGroups(placement),
              ElementsAre("0: 0-1 nvme", "0: 1-2 cpu", "0: 2-3 nvme", "0: 3-4 cpu"));
}

TEST(StatePlacement, AGradientStaysOnTheDeviceWhereAllOfItsUnitIsUpdatedThere) {
  Case followed{.units = {k, k},
                .optimizer = Tier::kCpu,
                .gradients = Tier::kCpu,
                .limits = {.sub_group_elements = k, .states_on_device = 0.5}};
  const StatePlacement placement = followed.Decide();
  EXPECT_EQ(placement.units[0].gradient, Tier::kDevice);
  EXPECT_EQ(placement.units[1].gradient, Tier::kCpu);
}

TEST(StatePlacement, AGradientOfTermsIsOnTheDeviceWhereTensorRanksMeet) {
  const StatePlacement placement = Case{
      .units = {k, k},
      .optimizer = Tier::kNvme,
      .gradients = Tier::kNvme,
      .sums_tensor = {true, false}}.Decide();
  EXPECT_EQ(placement.units[0].gradient, Tier::kDevice);
  EXPECT_EQ(placement.units[1].gradient, Tier::kNvme);
}

TEST(StatePlacement, UnitsKeptWholeHaveTheirParametersOnTheDevice) {
  const StatePlacement placement =
      Case{.units = {k, k}, .parameters = Tier::kNvme, .kept_whole = {true, false}}.Decide();
  EXPECT_THAT(Pieces(placement, 0), ElementsAre("0-1 device"));
  EXPECT_THAT(Pieces(placement, 1), ElementsAre("0-1 nvme"));
}

TEST(StatePlacement, FrozenParametersHavePiecesAndNoSubGroups) {
  ModelSpec model = UnitChain({k});
  model.parameters[0].trainable = false;
  Decisions decisions;
  decisions.stage = 3;
  decisions.parameter_tier = decisions.optimizer_tier = Tier::kNvme;
  decisions.kept_whole = decisions.sums_tensor = {false};
  const StatePlacement placement =
      DecidePlacement(decisions, *LayOut(model, 1), {.sub_group_elements = k});
  EXPECT_THAT(placement.sub_groups, IsEmpty());
  EXPECT_THAT(placement.units[0].trainable, IsEmpty());
  EXPECT_EQ(placement.units[0].frozen.size(), 1u);
}

}  // namespace
}  // namespace ebb::sharding::plan_pools_test
