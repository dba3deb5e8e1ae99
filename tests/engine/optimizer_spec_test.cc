// An optimizer of the trainer's, as a function: its arguments and number of calls, that training
// uses its arithmetic, and its errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <latch>
#include <map>
#include <mutex>

#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::optimizer_spec_test {
namespace {

using ::testing::Each;

class OptimizerSpecTest : public ::testing::TestWithParam<Setting> {
 protected:
  ModelSpec model_ = ScriptedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, OptimizerSpecTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

// w -= lr * sign(g): exact for any divisor and loss scale.
OptimizerSpec SignSgd() {
  return {.update = [](const UpdateSlice& update) {
    for (size_t i = 0; i < update.master.size(); ++i) {
      const float g = update.gradient[i], rate = static_cast<float>(update.learning_rate);
      update.master[i] -= g > 0 ? rate : g < 0 ? -rate : 0;
    }
    return absl::OkStatus();
  }};
}

TEST_P(OptimizerSpecTest, ItsStatesAreInWhatIsPredicted) {
  OptimizerSpec spec = SignSgd();
  spec.states = {"a", "b", "c"};
  const Config config = ConfigFor(GetParam());
  ASSERT_OK_AND_ASSIGN(const auto predicted,
                       PredictMemory(model_, GetParam().world, config, &spec));
  const auto look = [&](Engine& engine, ScriptedTrainer&) {
    for (const MemoryRow& row : engine.memory()) {
      const auto same =
          std::find_if(predicted.begin(), predicted.end(), [&](const MemoryRow& other) {
            return other.state == row.state && other.tier == row.tier;
          });
      EXPECT_EQ(row.predicted_bytes, same == predicted.end() ? 0 : same->predicted_bytes)
          << Name(row.state);
    }
    return absl::OkStatus();
  };
  RunOn(GetParam(), model_, config, look, {.optimizer = spec});
}

void StepBySign(ParameterValues& masters, const ParameterValues& gradients, float rate) {
  for (size_t p = 0; p < masters.size(); ++p) {
    for (size_t i = 0; i < masters[p].size(); ++i)
      masters[p][i] -= gradients[p][i] > 0 ? rate : gradients[p][i] < 0 ? -rate : 0;
  }
}

TEST_P(OptimizerSpecTest, SignSgdTrainsExactly) {
  for (const DType compute : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      if (compute == DType::kFloat16 && setting.timing == Timing::kEarly)
        continue;  // always checks
      Config config = ConfigFor(setting);
      config.compute = compute;
      config.communication = config.accumulation = DType::kFloat32;
      config.loss_scale.initial_scale_power = 4;
      config.optimizer.learning_rate = 0.25;
      const auto train = [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(ParameterValues masters,
                             GatherAll(engine, model_, StateClass::kMaster));
        for (int number = 0; number < 3; ++number) {
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number));
          StepBySign(masters, GradientSums(model_, setting.world, number), 0.25f);
        }
        EXPECT_EQ(*GatherAll(engine, model_, StateClass::kMaster), masters) << setting;
        // Scopes show the masters in the compute dtype.
        for (std::vector<float>& values : masters) {
          for (float& value : values) {
            if (compute == DType::kBFloat16) value = static_cast<float>(BFloat16(value));
            if (compute == DType::kFloat16) value = static_cast<float>(Float16(value));
          }
        }
        trainer.BeginStep(3, &masters);
        Evaluation evaluation = engine.BeginEvaluation();
        for (int unit : kScriptedUnits) trainer.Look(evaluation.Forward(UnitId{unit}), unit);
        return evaluation.Finish().status();
      };
      RunOn(setting, model_, config, train, {.optimizer = SignSgd()});
    }
  }
}

// The engine's own AdamW multiplies and adds in one rounding and folds its corrections into
// scalars; this one rounds each operation. Both are within a few units of 2^-24 of exact in every
// operation and take the same gradients. So after three steps of 0.01 they are within 1e-6 of each
// other.
TEST_P(OptimizerSpecTest, AdamWWrittenByHandAgreesWithTheEngines) {
  const OptimizerSpec by_hand{
      .states = {"exp_avg", "exp_avg_sq"}, .update = [](const UpdateSlice& update) {
        const float lr = static_cast<float>(update.learning_rate);
        const float correction1 = 1 - std::pow(0.9f, static_cast<float>(update.step));
        const float correction2 = 1 - std::pow(0.999f, static_cast<float>(update.step));
        for (size_t i = 0; i < update.master.size(); ++i) {
          const float g = update.gradient[i];
          float &w = update.master[i], &m = update.states[0][i], &v = update.states[1][i];
          m = 0.9f * m + 0.1f * g;
          v = 0.999f * v + 0.001f * g * g;
          w -= lr * 0.1f * w;
          w -= lr * (m / correction1) / (std::sqrt(v / correction2) + 1e-8f);
        }
        return absl::OkStatus();
      }};
  for (const Setting& setting : At(GetParam(), kTimings)) {
    Config config = ConfigFor(setting);
    config.optimizer.weight_decay = 0.1;
    std::vector<Snapshot> engines(static_cast<size_t>(setting.world));
    for (const bool own : {false, true}) {
      EngineOptions options;
      if (own) options.optimizer = by_hand;
      const auto train = [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(const ParameterValues first,
                             GatherAll(engine, model_, StateClass::kMaster));
        for (int number = 0; number < 3; ++number)
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number));
        EBB_ASSIGN_OR_RETURN(const Snapshot last, TakeSnapshot(engine, model_));
        Snapshot& expected = engines[static_cast<size_t>(trainer.rank())];
        if (!own) {
          expected = last;
          return absl::OkStatus();
        }
        float apart = 0, moved = 0;
        for (size_t p = 0; p < first.size(); ++p) {
          for (size_t i = 0; i < first[p].size(); ++i) {
            apart = std::max(apart, std::abs(last.masters[p][i] - expected.masters[p][i]));
            moved = std::max(moved, std::abs(last.masters[p][i] - first[p][i]));
          }
        }
        for (size_t s = 0; s < last.states.size(); ++s) {
          EXPECT_EQ(last.states[s].size(), expected.states[s].size());
          for (size_t i = 0; i < last.states[s].size(); ++i)
            apart = std::max(apart, std::abs(last.states[s][i] - expected.states[s][i]));
        }
        EXPECT_LT(apart, 1e-6) << setting;
        EXPECT_GT(moved, 0.02) << setting;
        return absl::OkStatus();
      };
      RunOn(setting, model_, config, train, options);
    }
  }
}

// Arguments of one call of one rank: parameter, begin, end.
using Range = std::tuple<int, int64_t, int64_t>;

TEST_P(OptimizerSpecTest, IsCalledOncePerOwnedRangeAndAppliedStep) {
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    Config config = ConfigFor(setting);
    config.optimizer.learning_rate = 0.5;
    config.ebb.parameter_groups["special"].lr_factor = 0.5;
    for (ParameterSpec& parameter : model_.parameters)
      parameter.group = parameter.name == "w4" ? "special" : "";
    OnThreads(setting.world, [&](World world) {
      std::mutex mutex;
      std::map<int64_t, std::vector<Range>> calls;  // by step of applied updates
      const OptimizerSpec spec{
          .states = {"a", "b", "c"}, .update = [&](const UpdateSlice& update) {
            const std::lock_guard lock(mutex);
            const Slice& slice = update.slice;
            const ParameterSpec& parameter = model_[slice.parameter];
            calls[update.step].emplace_back(static_cast<int>(slice.parameter), slice.begin,
                                            slice.end);
            EXPECT_TRUE(parameter.trainable);
            EXPECT_EQ(slice.name, parameter.name);
            EXPECT_EQ(update.group, parameter.group);
            EXPECT_EQ(update.learning_rate, update.group == "special" ? 0.25 : 0.5);
            const size_t count = static_cast<size_t>(slice.end - slice.begin);
            EXPECT_EQ(update.master.size(), count);
            EXPECT_EQ(update.gradient.size(), count);
            EXPECT_EQ(update.states.size(), 3u);
            for (size_t s = 0; s < update.states.size(); ++s) {
              // Zero at first, then the value of the update before.
              EXPECT_EQ(update.states[s].size(), count);
              EXPECT_THAT(update.states[s],
                          Each(static_cast<float>(static_cast<size_t>(update.step - 1) * (s + 1))));
              for (float& state : update.states[s]) state += static_cast<float>(s + 1);
            }
            return absl::OkStatus();
          }};
      ASSERT_OK_AND_ASSIGN(
          Engine engine, Engine::Create(world, Device::Cpu(), model_, config, {.optimizer = spec}));
      std::vector<Range> owned;
      ASSERT_OK(engine.Read(
          StateClass::kOptimizer,
          [&](const Slice& slice, std::span<const float> values) {
            owned.emplace_back(static_cast<int>(slice.parameter), slice.begin, slice.end);
            EXPECT_THAT(values, Each(0.0f));
            return absl::OkStatus();
          },
          "c"));
      ScriptedTrainer trainer(model_, world.rank());
      for (int number = 0; number < 4; ++number) {
        if (number == 2) {  // overflows, so it is not applied
          Step step = engine.BeginStep({.gradient_divisor = 4, .may_leave_out = true});
          trainer.ForwardAll(step);
          BackwardScope scope = step.Backward(UnitId{0});
          scope.gradient(ParameterId{0}).as<float>()[0] = INFINITY;
          scope.Close();
          ASSERT_OK(step.Finish());
        } else {
          ASSERT_OK(TrainStep(engine, trainer, number));
        }
      }
      ASSERT_OK(TakeSnapshot(engine, model_, {"a", "b", "c"}).status());
      const std::lock_guard lock(mutex);
      EXPECT_EQ(calls.size(), 3u);
      for (auto& [step, ranges] : calls) {
        std::sort(ranges.begin(), ranges.end());
        if (setting.stage > 0) {
          EXPECT_EQ(ranges, owned) << "step " << step << ", " << setting;
          continue;
        }
        std::vector<Range> whole;  // every rank updates all of it
        for (size_t p = 0; p < model_.parameters.size(); ++p) {
          if (model_.parameters[p].trainable)
            whole.emplace_back(p, 0, Elements(model_.parameters[p].shape));
        }
        EXPECT_EQ(ranges, whole) << "step " << step << ", " << setting;
      }
    });
  }
}

// On one rank. Late updates run on after Finish, so the step after may be the one that tells.
TEST_P(OptimizerSpecTest, ItsErrorFailsTheEngineOnEveryRank) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    const absl::Status status = RunThreads(setting.world, [&](World world) -> absl::Status {
      const bool culprit = world.rank() == 0;  // the others own little of that parameter or nothing
      const OptimizerSpec spec{.update = [culprit](const UpdateSlice& update) {
        return culprit && update.step == 2 && update.slice.name == "embedding"
                   ? absl::DataLossError("the moon is full")
                   : absl::OkStatus();
      }};
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(), model_,
                                                         ConfigFor(setting), {.optimizer = spec}));
      ScriptedTrainer trainer(model_, world.rank());
      EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
      absl::Status failed = TrainStep(engine, trainer, 1);
      if (failed.ok()) failed = TrainStep(engine, trainer, 2);
      EXPECT_THAT(failed, Says("the engine has failed", "the moon is full", "unit 'u0'"))
          << setting;
      EXPECT_FALSE(engine.Report().ok());
      EXPECT_FALSE(TrainStep(engine, trainer, 3).ok());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << setting << ": " << status;
  }
}

// The updates of one step, held up until the next has gone wrong, are still to be made.
TEST_P(OptimizerSpecTest, AWrongStepDoesNotStopTheUpdatesOfTheOneBefore) {
  for (const Timing timing : {Timing::kEarly, Timing::kLate}) {
    Setting setting = GetParam();
    setting.timing = timing;
    std::latch begun(setting.world);
    const OptimizerSpec waits{.update = [&](const UpdateSlice& update) {
      begun.wait();
      return SignSgd().update(update);
    }};
    const auto train = [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(ParameterValues masters, GatherAll(engine, model_, StateClass::kMaster));
      EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
      {
        Step wrong = engine.BeginStep({.gradient_divisor = -1});
        begun.count_down();
      }
      StepBySign(masters, GradientSums(model_, setting.world, 0), 0.01f);
      EXPECT_TRUE(*GatherAll(engine, model_, StateClass::kMaster) == masters) << setting;
      return absl::OkStatus();
    };
    RunOn(setting, model_, ConfigFor(setting), train, {.optimizer = waits});
  }
}

TEST_P(OptimizerSpecTest, WrongSpecsAreRefusedAtCreate) {
  const auto fine = [](const UpdateSlice&) { return absl::OkStatus(); };
  const std::pair<OptimizerSpec, const char*> wrongs[] = {
      {{.states = {"a"}}, "no update function"},
      {{.states = {"a", ""}, .update = fine}, "state 1 has no name"},
      {{.states = {"a", "b", "a"}, .update = fine}, "two states named 'a'"},
  };
  for (const auto& [spec, message] : wrongs) {
    for (const bool on_one_rank : {false, true}) {
      OnThreads(GetParam().world, [&](World world) {
        EngineOptions options{.optimizer = OptimizerSpec{.update = fine}};
        if (!on_one_rank || world.rank() == 0) options.optimizer = spec;
        const absl::Status made =
            Engine::Create(world, Device::Cpu(), model_, ConfigFor(GetParam()), options).status();
        EXPECT_THAT(made, StatusIs(absl::StatusCode::kInvalidArgument, "EngineOptions::optimizer",
                                   message));
      });
    }
  }
}

TEST(OptimizerSpecs, LimitsThatItOverrulesAreRemarkedUponAtStart) {
  const Setting setting{.world = 1, .stage = 3};
  Config config = ConfigFor(setting);
  config.zero.offload_optimizer.device = Tier::kCpu;
  config.zero.offload_optimizer.pin_memory = false;
  config.zero.sub_group_size = 2048;
  for (const bool own : {false, true}) {
    EngineOptions options;
    if (own) options.optimizer = SignSgd();
    ::testing::internal::CaptureStderr();
    const absl::Status status = RunEngines(
        setting, ScriptedModel(), config,
        [](Engine&, ScriptedTrainer&) { return absl::OkStatus(); }, options);
    EXPECT_EQ(Occurrences(::testing::internal::GetCapturedStderr(),
                          "\"zero_optimization.sub_group_size\" 2048 is no limit"),
              own ? 1 : 0);
    EXPECT_OK(status);
  }
}

TEST_P(OptimizerSpecTest, GroupSettingsThatItWouldIgnoreAreRefusedAtCreate) {
  model_.parameters[0].group = "special";
  Config config = ConfigFor(GetParam());
  config.ebb.parameter_groups["special"].weight_decay = 0.5;
  const absl::Status status = RunThreads(GetParam().world, [&](World world) {
    return Engine::Create(
               world, Device::Cpu(), model_, config,
               {.optimizer =
                    OptimizerSpec{.update = [](const UpdateSlice&) { return absl::OkStatus(); }}})
        .status();
  });
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               "parameter_groups.special.weight_decay"));
}

}  // namespace
}  // namespace ebb::testing::optimizer_spec_test
