#include "ebb/sharding/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/plan.h"
#include "unit_chain.h"

namespace ebb::sharding::placement_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// One rank, bf16, AdamW: 12 bytes of states an element.
struct Case {
  std::vector<int64_t> units;
  Tier parameters = Tier::kDevice, optimizer = Tier::kDevice, gradients = Tier::kDevice;
  PlacementLimits limits = {.sub_group_elements = 4 * kCutElements};
  bool own_optimizer = false;
  std::vector<bool> kept_whole = {};

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
                                 std::string(Name(piece.place.tier))));
  }
  return lines;
}

constexpr int64_t k = kCutElements;

std::string WhyNoneIsOffloaded(const Config& config) {
  const ModelSpec model = UnitChain({10 * k, 20 * k});
  const auto plan =
      PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
  if (!plan.ok()) return plan.status().ToString();
  return sharding::WhyNoneIsOffloaded(plan->decisions, plan->pools.placement, config);
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
  EXPECT_EQ(PieceOf(placement.units[1].trainable, 5 * k - 1).place.tier, Tier::kCpu);
  EXPECT_EQ(PieceOf(placement.units[1].trainable, 5 * k).place.tier, Tier::kNvme);
  // Pages of 2,048 elements in bf16.
  EXPECT_EQ(SwapBytes(placement, 0, 2), 0);
  EXPECT_EQ(SwapBytes(placement, 1, 2), 5 * 4096);
  EXPECT_EQ(SwapBytes(placement, 2, 2), 10 * 4096);
}

// What a sub-group writes of the parameters is in one tier, so it ends where a piece does.
TEST(StatePlacement, SubGroupsCrossNoPieceOfTheParameters) {
  const StatePlacement placement = Case{
      .units = {10 * k},
      .parameters = Tier::kNvme,
      .optimizer = Tier::kNvme,
      .limits = {
          .sub_group_elements = 4 * k,
          .parameters_in_cpu = 5 * k}}.Decide();
  EXPECT_THAT(SubGroups(placement),
              ElementsAre("0: 0-4 nvme", "0: 4-5 nvme", "0: 5-9 nvme", "0: 9-10 nvme"));
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

// Half of the states stay, alternating with those that leave: a sub-group stays while at most half
// of the elements so far would have stayed.
TEST(StatePlacement, TheDevicesShareOfTheStatesIsSpreadEvenly) {
  const StatePlacement placement = Case{
      .units = {4 * k, 4 * k},
      .optimizer = Tier::kCpu,
      .limits = {
          .sub_group_elements = k,
          .states_on_device = 0.5}}.Decide();
  EXPECT_THAT(SubGroups(placement),
              ElementsAre("0: 0-1 cpu", "0: 1-2 device", "0: 2-3 cpu", "0: 3-4 device",
                          "1: 0-1 cpu", "1: 1-2 device", "1: 2-3 cpu", "1: 3-4 device"));
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
  EXPECT_EQ(placement.units[0].gradient, Tier::kCpu);
  EXPECT_EQ(placement.units[1].gradient, Tier::kDevice);
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
  decisions.kept_whole = {false};
  const StatePlacement placement =
      DecidePlacement(decisions, *LayOut(model, 1), {.sub_group_elements = k});
  EXPECT_THAT(placement.sub_groups, IsEmpty());
  EXPECT_THAT(placement.units[0].trainable, IsEmpty());
  EXPECT_EQ(placement.units[0].frozen.size(), 1u);
  EXPECT_EQ(SwapBytes(placement, 0, 4), 4 * k);
}

}  // namespace
}  // namespace ebb::sharding::placement_test
