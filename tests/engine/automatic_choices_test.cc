// "zero_optimization.offload_optimizer.ratio" "auto" on the CPU, where memory alone decides, and
// the measurement behind it elsewhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/engine/create/measurements.h"
#include "ebb/sharding/report/traffic.h"
#include "tests/engine/offload_ratio.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/engine/verify_swap.h"
#include "tests/offload/has_once.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::automatic_choices_test {
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
    OnThreads(kWorld, [&](World world) {
      const ToyModel model = SomeModel();
      ASSERT_OK_AND_ASSIGN(const Engine engine,
                           Engine::Create(world, Device::Cpu(1), model.spec(), config));
      resolved[static_cast<size_t>(world.rank())] = engine.config();
      const auto predicted = PredictMemory(model.spec(), kWorld, config);
      EXPECT_EQ(DeviceBytes(engine.memory()), DeviceBytes(*predicted));
    });
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
  EXPECT_THAT(predicted, StatusIs(absl::StatusCode::kResourceExhausted, "ebb.device_memory is "));
  OnThreads(kWorld, [&](World world) {
    const absl::Status created =
        Engine::Create(world, Device::Cpu(1), model.spec(), WithAutoRatio(config)).status();
    EXPECT_THAT(created, Says("ebb.device_memory is "));
  });
}

TEST_F(OffloadRatioTest, AutoHasTheBitsOfEveryRatioAndItsNumberRepeatsIt) {
  const ToyModel model = SomeModel();
  for (const Tier tier : {Tier::kCpu, Tier::kNvme}) {
    for (const Timing timing : kTimings) {
      SCOPED_TRACE(::testing::Message() << Name(tier) << static_cast<int>(timing));
      const Config config = ConfigOf(tier, timing);
      Config some = WithAutoRatio(config);
      some.ebb.device_memory = BytesOf(WithRatio(config, 0.6));
      ASSERT_OK_AND_ASSIGN(const auto all,
                           TrainedMasterBits(kWorld, model, WithRatio(config, 1), kSteps));
      ASSERT_OK_AND_ASSIGN(const Config again, Config::FromJson(Resolved(some).ToJson()));
      EXPECT_EQ(Resolved(again).ToJson(), again.ToJson());
      for (const Config& other : {WithRatio(config, 0), WithAutoRatio(config), some, again}) {
        ASSERT_OK_AND_ASSIGN(const auto bits, TrainedMasterBits(kWorld, model, other, kSteps));
        EXPECT_EQ(bits, all);
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
  ASSERT_OK_AND_ASSIGN(const auto kernels, optim::Kernels::For(device));
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
      ASSERT_OK_AND_ASSIGN(const auto rates,
                           MeasureUpdateRates(device, *kernels, *kernels, shape, scratch));
      for (const double rate : {rates.device, rates.host, rates.copies}) {
        EXPECT_GT(rate, 0);
        EXPECT_TRUE(std::isfinite(rate));
      }
    }
  }
}

// The classes on the disk that have checksums: the choice of ebb.verify_swap "auto", and the
// message about classes without checksums.

using verify_swap::Cell;
using verify_swap::FileOf;
using verify_swap::FlipBit;
using verify_swap::Trained;

struct Chosen {
  std::vector<VerifySwap> of_ranks;
  std::string log;
};

Chosen ChosenFor(const Cell& cell, const Config& config) {
  Chosen chosen;
  chosen.of_ranks.assign(static_cast<size_t>(cell.world), VerifySwap::kAuto);
  ::testing::internal::CaptureStderr();
  const absl::Status status = RunThreads(cell.world, [&](World world) -> absl::Status {
    const ToyModel model(ModelOf(cell));
    absl::StatusOr<Engine> engine =
        Engine::Create(world, Device::Cpu(/*threads=*/1), model.spec(), config);
    if (!engine.ok()) return engine.status();
    chosen.of_ranks[static_cast<size_t>(world.rank())] = engine->config().ebb.verify_swap;
    return absl::OkStatus();
  });
  chosen.log = ::testing::internal::GetCapturedStderr();
  EXPECT_OK(status);
  return chosen;
}

// One that is slow beside the sums, and one that is fast.
constexpr double kDiskRates[] = {1, 1e15};

TEST(VerifySwapChoice, AutoIsAllIfTheDiskTakesLongerAndLogsTheMeasurement) {
  for (const int world : {1, 2}) {
    for (const double rate : kDiskRates) {
      const Scratch scratch;
      const Cell cell{.name = "", .world = world};
      Config config = ConfigFor(cell, scratch.path());
      config.ebb.verify_swap = VerifySwap::kAuto;
      TestOverrides().disk_rate = [rate] { return rate; };
      const Chosen chosen = ChosenFor(cell, config);
      MadeFiles::ClearOverrides();
      const bool is_all = rate == kDiskRates[0];
      for (const VerifySwap of_rank : chosen.of_ranks)
        EXPECT_EQ(of_rank, is_all ? VerifySwap::kAll : VerifySwap::kStates);
      EXPECT_THAT(chosen.log, HasOnce(is_all ? "\"ebb.verify_swap\" auto is all here: "
                                             : "\"ebb.verify_swap\" auto is states here: "));
      EXPECT_EQ(Occurrences(chosen.log, "parameters on the disk have no checksum"), is_all ? 0 : 1);
    }
  }
}

// Sums from before the choice remain, if their class still has sums.
TEST(VerifySwapChoice, AutoFindsAFlippedBitInTheChosenClasses) {
  for (const double rate : kDiskRates) {
    for (const bool of_states : {false, true}) {
      const Scratch scratch;
      const Cell cell{.name = ""};
      Config config = ConfigFor(cell, scratch.path());
      config.ebb.verify_swap = VerifySwap::kAuto;
      TestOverrides().disk_rate = [rate] { return rate; };
      const Trained run =
          Train(cell, config, /*before=*/0, 3, [&](const std::string& path, const sharding::Plan&) {
            FlipBit(FileOf(path, 0, of_states ? "states" : "parameters"), 1);
          });
      MadeFiles::ClearOverrides();
      const bool is_found = of_states || rate == kDiskRates[0];
      EXPECT_EQ(run.statuses.front().code(),
                is_found ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk)
          << run.statuses.front();
    }
  }
}

TEST(VerifySwapChoice, ClassesOnTheDiskWithoutAChecksumAreSaidAtTheStart) {
  struct Case {
    Cell cell;
    VerifySwap verify;
    std::string left;  // "": nothing is said
  };
  const Cell trained{.name = "", .split = true, .frozen = false};
  const Cell all_classes{.name = "", .gradients = true, .boundaries = true};
  for (const Case& c : {
           Case{all_classes, VerifySwap::kOff,
                "parameters, masters, optimizer states, gradients and boundary activations"},
           Case{all_classes, VerifySwap::kStates, "parameters, gradients and boundary activations"},
           Case{all_classes, VerifySwap::kAll, ""},
           Case{{.name = "", .split = true}, VerifySwap::kStates, "frozen parameters"},
           Case{trained, VerifySwap::kStates, ""},
           Case{trained, VerifySwap::kAuto, ""},
       }) {
    SCOPED_TRACE(c.left);
    const Scratch scratch;
    Config config = ConfigFor(c.cell, scratch.path());
    config.ebb.verify_swap = c.verify;
    const Chosen chosen = ChosenFor(c.cell, config);
    const std::string line = " on the disk have no checksum";
    EXPECT_EQ(Occurrences(chosen.log, line), c.left.empty() ? 0 : 1);
    EXPECT_EQ(Occurrences(chosen.log, "engine: " + c.left + line), c.left.empty() ? 0 : 1);
    // If "states" leaves no class out, "all" is the same, and nothing has to be measured.
    EXPECT_THAT(chosen.log, ::testing::Not(HasSubstr("\"ebb.verify_swap\" auto")));
    EXPECT_EQ(chosen.of_ranks.front(), c.verify == VerifySwap::kAuto ? VerifySwap::kAll : c.verify);
  }
}

// The choice whether all that is on the disk has checksums: by a step's bytes from its plan, and
// the share of a step that sums can take.

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
  EXPECT_OK(resolved);
  absl::StatusOr<sharding::Plan> plan =
      sharding::PlanStep({.model = &model.spec(), .config = &*resolved, .world = 1});
  EXPECT_OK(plan);
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
      for (const sharding::Op& operation : plan.ops) {
        if (operation.role != sharding::Role::kCastMasters) continue;
        for (const sharding::UpdateDetail& of : operation.updates)
          masters += 4 * plan.table.sub_groups[static_cast<size_t>(of.sub_group)].count();
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
}  // namespace ebb::testing::automatic_choices_test
