// "zero_optimization.offload_optimizer.ratio" "auto" on the CPU, where memory alone decides, and
// the measurement behind it elsewhere.
#include "tests/engine/offload_ratio.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/update_rates.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::offload_ratio_test {
namespace {

using ::testing::HasSubstr;

constexpr int kWorld = 2, kSteps = 3;

ToyModel SomeModel() {
  return ToyModel({.width = 67});
}

class OffloadRatioTest : public ::testing::Test {
 protected:
  Config ConfigOf(Tier tier, Timing timing = Timing::kLate) {
    Config config = ConfigFor({.world = kWorld, .stage = 2, .timing = timing});
    config.compute = DType::kBFloat16;
    config.zero.sub_group_size = 2048;
    config.zero.offload_optimizer = {
        .device = tier, .nvme_paths = {scratch_.path()}, .pin_memory = false};
    return config;
  }
  static int64_t BytesOf(const Config& config) {
    return DeviceBytes(SomeModel().spec(), kWorld, config);
  }
  // The ratio that the engines of all ranks have chosen.
  static Config Resolved(const Config& config) {
    std::vector<Config> resolved(kWorld);
    const absl::Status status = RunThreads(kWorld, [&](World world) -> absl::Status {
      const ToyModel model = SomeModel();
      EBB_ASSIGN_OR_RETURN(const Engine engine,
                           Engine::Create(world, Device::Cpu(1), model.spec(), config));
      resolved[static_cast<size_t>(world.rank())] = engine.config();
      const auto predicted = PredictMemory(model.spec(), kWorld, config);
      EXPECT_EQ(DeviceBytes(engine.memory()), DeviceBytes(*predicted));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(resolved[0].ToJson(), resolved[1].ToJson());
    return resolved[0];
  }

  Scratch scratch_;
};

TEST_F(OffloadRatioTest, AutoOnTheCpuFollowsTheMemoryCap) {
  for (const Tier tier : {Tier::kCpu, Tier::kNvme}) {
    Config config = ConfigOf(tier);
    const OffloadOptimizerConfig free = Resolved(WithAutoRatio(config)).zero.offload_optimizer;
    EXPECT_EQ(free.ratio, 0);
    EXPECT_FALSE(free.measures_ratio);
    config.ebb.device_memory = BytesOf(WithRatio(config, 0.6));
    const OffloadOptimizerConfig capped = Resolved(WithAutoRatio(config)).zero.offload_optimizer;
    EXPECT_GT(capped.ratio, 0);
    EXPECT_LT(capped.ratio, 1);
    EXPECT_LE(BytesOf(WithRatio(config, capped.ratio)), *config.ebb.device_memory);
    EXPECT_FALSE(capped.measures_ratio);
    const double less = std::round(capped.ratio * 100 - 1) / 100;
    EXPECT_FALSE(PredictMemory(SomeModel().spec(), kWorld, WithRatio(config, less)).ok());
    config.ebb.device_memory = BytesOf(WithRatio(config, 1));
    EXPECT_EQ(BytesOf(Resolved(WithAutoRatio(config))), *config.ebb.device_memory);
  }
}

TEST_F(OffloadRatioTest, AutoForAModelThatFitsNowhereIsRefused) {
  Config config = ConfigOf(Tier::kCpu);
  config.ebb.device_memory = BytesOf(WithRatio(config, 1)) - 1;
  const ToyModel model = SomeModel();
  const absl::Status predicted =
      PredictMemory(model.spec(), kWorld, WithAutoRatio(config)).status();
  EXPECT_EQ(predicted.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(predicted.message()), HasSubstr("ebb.device_memory is "));
  const absl::Status status = RunThreads(kWorld, [&](World world) -> absl::Status {
    const absl::Status created =
        Engine::Create(world, Device::Cpu(1), model.spec(), WithAutoRatio(config)).status();
    EXPECT_THAT(std::string(created.message()), HasSubstr("ebb.device_memory is "));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(OffloadRatioTest, AutoHasTheBitsOfEveryRatioAndItsNumberRepeatsIt) {
  const ToyModel model = SomeModel();
  for (const Tier tier : {Tier::kCpu, Tier::kNvme}) {
    for (const Timing timing : kTimings) {
      SCOPED_TRACE(::testing::Message() << Name(tier) << static_cast<int>(timing));
      const Config config = ConfigOf(tier, timing);
      Config some = WithAutoRatio(config);
      some.ebb.device_memory = BytesOf(WithRatio(config, 0.6));
      const auto all = TrainedMasterBits(kWorld, model, WithRatio(config, 1), kSteps);
      ASSERT_TRUE(all.ok()) << all.status();
      const absl::StatusOr<Config> again = Config::FromJson(Resolved(some).ToJson());
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(Resolved(*again).ToJson(), again->ToJson());
      for (const Config& other : {WithRatio(config, 0), WithAutoRatio(config), some, *again}) {
        const auto bits = TrainedMasterBits(kWorld, model, other, kSteps);
        ASSERT_TRUE(bits.ok()) << bits.status();
        EXPECT_EQ(*bits, *all);
      }
    }
  }
}

TEST_F(OffloadRatioTest, AutoWithoutOffloadIsOne) {
  const OffloadOptimizerConfig optimizer =
      Resolved(WithAutoRatio(ConfigOf(Tier::kDevice))).zero.offload_optimizer;
  EXPECT_EQ(optimizer.ratio, 1);
  EXPECT_FALSE(optimizer.measures_ratio);
}

TEST(UpdateRates, EveryKindOfUpdateHasThem) {
  const Device device = Device::Cpu(2);
  const auto kernels = optim::Kernels::For(device);
  ASSERT_TRUE(kernels.ok()) << kernels.status();
  using enum DType;
  using optim::MasterForm;
  for (const OptimizerConfig& optimizer :
       {OptimizerConfig{}, OptimizerConfig{.type = OptimizerType::kSgd},
        OptimizerConfig{.type = OptimizerType::kSgd, .momentum = 0.9}}) {
    for (const UpdateShape& kind : {
             UpdateShape{.elements = 1},
             UpdateShape{.elements = 5000, .sent = kBFloat16},
             UpdateShape{.gradient = kFloat16, .parameter = kFloat16, .sent = kFloat32},
             UpdateShape{.elements = 70'000,
             .master = MasterForm::kSplit,
             .gradient = kBFloat16,
             .parameter = kBFloat16,
             .sent = kBFloat16,
             .parameters_go_up = false},
             UpdateShape{.elements = 4096,
             .master = MasterForm::kParameter,
             .parameter = kBFloat16,
             .pins_host_memory = false},
         }) {
      UpdateShape shape = kind;
      shape.optimizer = optimizer;
      UpdateScratch scratch;
      const auto rates = MeasureUpdateRates(device, **kernels, **kernels, shape, scratch);
      ASSERT_TRUE(rates.ok()) << rates.status();
      for (const double rate : {rates->device, rates->host, rates->copies}) {
        EXPECT_GT(rate, 0);
        EXPECT_TRUE(std::isfinite(rate));
      }
    }
  }
}

}  // namespace
}  // namespace ebb::testing::offload_ratio_test
