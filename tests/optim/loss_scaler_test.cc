#include "ebb/optim/loss_scaler.h"

#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::optim::loss_scaler_test {
namespace {

using testing::ElementsAre;

// The scale after each step: 'o' is an overflow, '.' a clean step. Expected values are computed by
// hand from the rules of DeepSpeed's DynamicLossScaler (0.19.6).
std::vector<float> ScalesAfter(LossScaler& scaler, std::string_view steps) {
  std::vector<float> scales;
  for (const char step : steps) {
    scaler.Update(step == 'o');
    scales.push_back(scaler.scale());
  }
  return scales;
}

LossScaler Dynamic(LossScaleConfig config) {
  return LossScaler(config, DType::kFloat16);
}

TEST(LossScalerTest, StartsAtThePowerOfTheConfig) {
  EXPECT_EQ(Dynamic({}).scale(), 65536);
  EXPECT_EQ(Dynamic({.initial_scale_power = 3}).scale(), 8);
}

TEST(LossScalerTest, WithoutOverflowDoublesAtEveryWindow) {
  LossScaler scaler = Dynamic({.initial_scale_power = 8, .window = 2});
  // The step numbered `window`, counting from 0, is the first that doubles.
  EXPECT_THAT(ScalesAfter(scaler, "......."), ElementsAre(256, 256, 512, 512, 1024, 1024, 2048));
}

TEST(LossScalerTest, AWindowOfOneDoublesFromTheSecondStepOn) {
  LossScaler scaler = Dynamic({.initial_scale_power = 2, .window = 1});
  EXPECT_THAT(ScalesAfter(scaler, "...."), ElementsAre(4, 8, 16, 32));
}

TEST(LossScalerTest, EveryOverflowHalvesWithoutHysteresis) {
  LossScaler scaler = Dynamic({.initial_scale_power = 4, .hysteresis = 1});
  EXPECT_THAT(ScalesAfter(scaler, "ooo"), ElementsAre(8, 4, 2));
  EXPECT_FALSE(scaler.at_minimum());
}

TEST(LossScalerTest, StaysAtTheMinimumAndSaysSo) {
  LossScaler scaler = Dynamic({.initial_scale_power = 4, .hysteresis = 1, .min_scale = 3});
  EXPECT_FALSE(scaler.at_minimum());
  EXPECT_THAT(ScalesAfter(scaler, "ooooo"), ElementsAre(8, 4, 3, 3, 3));
  EXPECT_TRUE(scaler.at_minimum());
}

TEST(LossScalerTest, LeavesTheMinimumByGrowing) {
  LossScaler scaler = Dynamic({.initial_scale_power = 0, .window = 2, .hysteresis = 1});
  EXPECT_TRUE(scaler.at_minimum());
  EXPECT_THAT(ScalesAfter(scaler, "o..."), ElementsAre(1, 1, 1, 2));
  EXPECT_FALSE(scaler.at_minimum());
}

TEST(LossScalerTest, SomeOverflowsHalveAndRestartTheWindow) {
  LossScaler scaler = Dynamic({.initial_scale_power = 8, .window = 2, .hysteresis = 1});
  // After an overflow at step i the next doubling is at i + 1 + window.
  EXPECT_THAT(ScalesAfter(scaler, "oo...o...."),
              ElementsAre(128, 64, 64, 64, 128, 64, 64, 64, 128, 128));
}

TEST(LossScalerTest, TheFirstOverflowOnlyUsesUpTheHysteresis) {
  LossScaler scaler = Dynamic({.initial_scale_power = 8, .window = 1000, .hysteresis = 2});
  EXPECT_THAT(ScalesAfter(scaler, "oo.o"), ElementsAre(256, 128, 128, 64));
}

TEST(LossScalerTest, AGrowthRefillsTheHysteresis) {
  LossScaler scaler = Dynamic({.initial_scale_power = 8, .window = 2, .hysteresis = 3});
  EXPECT_THAT(ScalesAfter(scaler, "oo.o...ooo"),
              ElementsAre(256, 256, 256, 128, 128, 128, 256, 256, 256, 128));
}

TEST(LossScalerTest, ConsecutiveHysteresisIsRefilledByAnyCleanStep) {
  LossScaler scaler = Dynamic(
      {.initial_scale_power = 8, .window = 1000, .hysteresis = 2, .consecutive_hysteresis = true});
  EXPECT_THAT(ScalesAfter(scaler, "o.o.ooo"), ElementsAre(256, 256, 256, 256, 256, 128, 64));
}

TEST(LossScalerTest, ResumesFromAnotherScalersState) {
  const LossScaleConfig config = {.initial_scale_power = 8, .window = 3, .hysteresis = 2};
  const std::string_view steps = "..o.o....o..oo......";
  for (size_t at = 0; at <= steps.size(); ++at) {
    LossScaler whole = Dynamic(config), first = Dynamic(config), second = Dynamic(config);
    ScalesAfter(whole, steps.substr(0, at));
    ScalesAfter(first, steps.substr(0, at));
    second.Resume(first.state());
    EXPECT_EQ(second.scale(), whole.scale());
    EXPECT_EQ(ScalesAfter(second, steps.substr(at)), ScalesAfter(whole, steps.substr(at))) << at;
  }
}

TEST(LossScalerTest, AStaticScaleIsTheConfigsAfterAnyResume) {
  LossScaler scaler({.static_scale = 128}, DType::kFloat16);
  scaler.Resume({.scale = 4});
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScalerTest, AStaticScaleNeverChanges) {
  LossScaler scaler({.static_scale = 128, .window = 1, .hysteresis = 1}, DType::kFloat16);
  EXPECT_THAT(ScalesAfter(scaler, "o.o..oo"), ElementsAre(128, 128, 128, 128, 128, 128, 128));
  EXPECT_FALSE(scaler.at_minimum());
}

TEST(LossScalerTest, OnlyFp16IsScaled) {
  for (const DType compute : {DType::kBFloat16, DType::kFloat32}) {
    LossScaler scaler({.static_scale = 128, .window = 1, .hysteresis = 1}, compute);
    EXPECT_EQ(scaler.scale(), 1);
    EXPECT_THAT(ScalesAfter(scaler, "o.."), ElementsAre(1, 1, 1));
    EXPECT_FALSE(scaler.at_minimum());
  }
}

}  // namespace
}  // namespace ebb::optim::loss_scaler_test
