// Engines with state below the device, beside one on the device. They have the same bits, also if a
// call reads the state, takes the device away or copies it while updates still run.
#include <gtest/gtest.h>

#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::swap_test {
namespace {

constexpr int kWorld = 2, kSteps = 5;

struct Tiers {
  const char* name;
  Tier parameters, optimizer;
  DType dtype = DType::kFloat32;
  bool split = false, shares = false, without_masters = false;
};
void PrintTo(const Tiers& tiers, std::ostream* out) {
  *out << tiers.name;
}

Config ConfigOf(const Tiers& tiers, Timing timing, const std::string& path) {
  Config config = OnNvme(ConfigFor({.world = kWorld, .stage = 3, .timing = timing}), path);
  config.compute = tiers.dtype;
  config.ebb.split_master = tiers.split;
  config.ebb.stochastic_rounding = tiers.without_masters;
  config.zero.offload_param.device = tiers.parameters;
  config.zero.offload_optimizer.device = tiers.optimizer;
  config.zero.sub_group_size = 2048;
  // With gathers of their own, with which early updates can share reads.
  if (timing == Timing::kEarly) config.ebb.coalesce_bytes = 0;
  if (tiers.shares) {
    config.zero.offload_param.max_in_cpu = 7'000;
    config.zero.offload_optimizer.ratio = 0.6;
  }
  return config;
}

ToyModel SomeModel() {
  return ToyModel({.width = 67});
}

// Every number that a run leaves behind.
struct Outcome {
  std::vector<Snapshot> snapshots;
  std::vector<double> evaluations;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// A call after each step, beside looking at it.
using Between = std::function<absl::Status(Engine& engine, const ModelSpec& spec, int step)>;

Outcome RunAll(const Config& config, const Between& between) {
  Outcome outcome;
  OnThreads(kWorld, [&](World world) {
    ToyModel model = SomeModel();
    ASSERT_OK_AND_ASSIGN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model.spec(), config));
    const bool keeps = world.rank() == 0;
    for (int step = 0; step < kSteps; ++step) {
      const bool held = step == 2;
      ASSERT_OK(model.Train(engine, world.rank(), step, {.hold_updates = held}));
      ASSERT_OK(between(engine, model.spec(), step));
      if (step % 2 == 1) continue;
      ASSERT_OK_AND_ASSIGN(const double evaluation, model.Evaluate(engine, world.rank()));
      if (keeps) outcome.evaluations.push_back(evaluation);
      if (step == 2) continue;  // no call looks at state between these steps
      ASSERT_OK_AND_ASSIGN(Snapshot snapshot, TakeSnapshot(engine, model.spec()));
      if (keeps) outcome.snapshots.push_back(std::move(snapshot));
    }
  });
  return outcome;
}

class SwapTest : public ::testing::TestWithParam<Tiers> {
 protected:
  // Expects the same bits with these tiers as on the device.
  void ExpectTheBitsOfTheDevice(const Between& between) {
    Tiers device = GetParam();
    device.parameters = device.optimizer = Tier::kDevice;
    device.split = device.shares = false;
    for (const Timing timing : kTimings) {
      SCOPED_TRACE(static_cast<int>(timing));
      const Outcome expected = RunAll(ConfigOf(device, timing, scratch_.path()), between);
      const Outcome outcome = RunAll(ConfigOf(GetParam(), timing, scratch_.path()), between);
      EXPECT_TRUE(outcome.snapshots == expected.snapshots);
      EXPECT_EQ(outcome.evaluations, expected.evaluations);
      EXPECT_FALSE(expected.snapshots.empty());
      EXPECT_TRUE(scratch_.Entries().empty());
    }
  }

  Scratch scratch_;
};

INSTANTIATE_TEST_SUITE_P(Tiers, SwapTest,
                         ::testing::Values(Tiers{.name = "ParametersOnNvme",
                                                 .parameters = Tier::kNvme,
                                                 .optimizer = Tier::kDevice},
                                           Tiers{.name = "ParametersInCpuStatesOnNvme",
                                                 .parameters = Tier::kCpu,
                                                 .optimizer = Tier::kNvme,
                                                 .dtype = DType::kFloat16},
                                           Tiers{.name = "SplitMasters",
                                                 .parameters = Tier::kNvme,
                                                 .optimizer = Tier::kNvme,
                                                 .dtype = DType::kBFloat16,
                                                 .split = true},
                                           Tiers{.name = "WithoutMasters",
                                                 .parameters = Tier::kNvme,
                                                 .optimizer = Tier::kNvme,
                                                 .dtype = DType::kBFloat16,
                                                 .shares = true,
                                                 .without_masters = true}),
                         [](const auto& test) { return test.param.name; });

TEST_P(SwapTest, ReadsAndWritesOfEveryClassChangeNoBit) {
  // Without masters a value is kept as the cast of parameters makes it.
  const bool rounds = GetParam().without_masters;
  const auto between = [=](Engine& engine, const ModelSpec& spec, int step) -> absl::Status {
    if (step == 1) EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, Normal(0.2f, 11)));
    if (step == 2) {
      EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Normal(0.1f, 12), "exp_avg"));
      EBB_RETURN_IF_ERROR(engine.Write(StateClass::kParameter, Normal(0.3f, 10)));
    }
    if (step == 3) {
      EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Constant(0.03f), "exp_avg_sq"));
      // Written values are what is read, at once and before any step.
      EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, Normal(0.25f, 13)));
      EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                           ReadSlices(engine, spec, StateClass::kMaster));
      const Initialiser source = Normal(0.25f, 13);
      for (size_t p = 0; p < masters.size(); ++p) {
        if (!spec.parameters[p].trainable) continue;
        std::vector<float> written(masters[p].size());
        const Slice slice{.parameter = ParameterId{static_cast<int32_t>(p)},
                          .name = spec.parameters[p].name,
                          .shape = spec.parameters[p].shape,
                          .begin = 0,
                          .end = static_cast<int64_t>(written.size())};
        EBB_RETURN_IF_ERROR(source(slice, written));
        for (size_t i = 0; i < written.size(); ++i) {
          if (masters[p][i] == masters[p][i]) {  // this rank's
            EXPECT_EQ(masters[p][i],
                      rounds ? static_cast<float>(RoundHalfAway(written[i])) : written[i]);
          }
        }
      }
    }
    return absl::OkStatus();
  };
  ExpectTheBitsOfTheDevice(between);
}

// The master is written with the parameter. Where updates carry parameters to their place, a
// skipped step makes parameters of masters.
TEST_P(SwapTest, AWrittenParameterOutlivesASkippedStep) {
  for (const Timing timing : kNotEarly) {
    const Config config = ConfigOf(GetParam(), timing, scratch_.path());
    OnThreads(kWorld, [&](World world) {
      ToyModel model = SomeModel();
      const ModelSpec& spec = model.spec();
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), spec, config));
      ASSERT_OK(model.Train(engine, world.rank(), 0));
      ASSERT_OK(engine.Write(StateClass::kParameter, Normal(0.3f, 10)));
      ASSERT_OK_AND_ASSIGN(const ParameterValues written,
                           GatherAll(engine, spec, StateClass::kParameter));
      ASSERT_OK(model.Train(engine, world.rank(), 1, {}, /*blow_up=*/true));
      ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
      EXPECT_FALSE(report.applied);
      for (const StateClass what : {StateClass::kParameter, StateClass::kMaster}) {
        ASSERT_OK_AND_ASSIGN(const ParameterValues kept, GatherAll(engine, spec, what));
        EXPECT_EQ(kept, written) << Name(what);
      }
    });
  }
}

// Nobody looks between these steps, so that each has the updates of the one before to do.
absl::Status TrainAndReadGradients(World world, const Config& config,
                                   std::vector<ParameterValues>& gradients, Snapshot& last) {
  ToyModel model = SomeModel();
  EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model.spec(), config));
  for (int n = 0; n < kSteps; ++n) {
    const bool held = n % 2 == 1;
    Step step = engine.BeginStep({.hold_updates = held});
    for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, world.rank(), n);
    for (int v = model.visits(); v-- > 0;) model.Backward(step, v, world.rank(), n);
    if (held) {
      EBB_RETURN_IF_ERROR(step.Reduce());
      EBB_ASSIGN_OR_RETURN(ParameterValues read,
                           ReadSlices(engine, model.spec(), StateClass::kGradient));
      if (world.rank() == 0) gradients.push_back(std::move(read));
    }
    EBB_RETURN_IF_ERROR(step.Finish());
  }
  EBB_ASSIGN_OR_RETURN(Snapshot snapshot, TakeSnapshot(engine, model.spec()));
  if (world.rank() == 0) last = std::move(snapshot);
  return absl::OkStatus();
}

TEST_P(SwapTest, GradientsOfHeldStepsAreReadBesideUpdatesOfTheStepBefore) {
  Tiers device = GetParam();
  device.parameters = device.optimizer = Tier::kDevice;
  device.split = device.shares = false;
  for (const Timing timing : kTimings) {
    SCOPED_TRACE(static_cast<int>(timing));
    std::vector<ParameterValues> expected_gradients, gradients;
    Snapshot expected, last;
    for (const bool on_device : {true, false}) {
      const Config config = ConfigOf(on_device ? device : GetParam(), timing, scratch_.path());
      const absl::Status status = RunThreads(kWorld, [&](World world) {
        return TrainAndReadGradients(world, config, on_device ? expected_gradients : gradients,
                                     on_device ? expected : last);
      });
      ASSERT_OK(status);
    }
    ASSERT_EQ(gradients.size(), expected_gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      for (size_t p = 0; p < gradients[i].size(); ++p) {
        ASSERT_EQ(gradients[i][p].size(), expected_gradients[i][p].size());
        // Elements of other ranks are NaN.
        EXPECT_EQ(std::memcmp(gradients[i][p].data(), expected_gradients[i][p].data(),
                              gradients[i][p].size() * sizeof(float)),
                  0);
      }
    }
    EXPECT_TRUE(last == expected);
  }
}

// Parameters of an engine into one that keeps them elsewhere, and back.
TEST_P(SwapTest, CopiesBetweenEnginesOfOtherTiers) {
  const Tiers device{.name = "",
                     .parameters = Tier::kDevice,
                     .optimizer = Tier::kDevice,
                     .dtype = GetParam().dtype,
                     .without_masters = GetParam().without_masters};
  for (const Timing timing : kTimings) {
    SCOPED_TRACE(static_cast<int>(timing));
    OnThreads(kWorld, [&](World world) {
      ToyModel model = SomeModel(), other = SomeModel();
      const ModelSpec& spec = model.spec();
      ASSERT_OK_AND_ASSIGN(
          Engine above, Engine::Create(world, Device::Cpu(1), spec,
                                       ConfigOf(device, timing, scratch_.path()), {.name = "a"}));
      ASSERT_OK_AND_ASSIGN(
          Engine below,
          Engine::Create(world, Device::Cpu(1), spec, ConfigOf(GetParam(), timing, scratch_.path()),
                         {.name = "b"}));
      for (int step = 0; step < 2; ++step) {
        ASSERT_OK(model.Train(above, world.rank(), step));
        ASSERT_OK(other.Train(below, world.rank(), step + 7));
      }
      for (Engine* to : {&below, &above, &below}) {
        Engine& from = to == &below ? above : below;
        ASSERT_OK(to->CopyParametersFrom(from));
        ASSERT_OK_AND_ASSIGN(const ParameterValues copied,
                             GatherAll(*to, spec, StateClass::kMaster));
        ASSERT_OK_AND_ASSIGN(const ParameterValues original,
                             GatherAll(from, spec, StateClass::kMaster));
        EXPECT_TRUE(copied == original);
        ASSERT_OK_AND_ASSIGN(const double shown, model.Evaluate(*to, world.rank()));
        ASSERT_OK_AND_ASSIGN(const double of_original, model.Evaluate(from, world.rank()));
        EXPECT_EQ(shown, of_original);
        ASSERT_OK(model.Train(from, world.rank(), 20));
      }
    });
    EXPECT_TRUE(scratch_.Entries().empty());
  }
}

}  // namespace
}  // namespace ebb::testing::swap_test
