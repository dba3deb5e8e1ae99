// Reading, writing and gathering state: the slices and values, the times at which it is allowed,
// and its errors.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing::state_access_test {
namespace {

constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

float InDType(DType dtype, float value) {
  if (dtype == DType::kBFloat16) return static_cast<float>(BFloat16(value));
  if (dtype == DType::kFloat16) return static_cast<float>(Float16(value));
  return value;
}

// Another model's values: exact in every compute dtype, different in every element nearby.
float Written(int parameter, int64_t element) {
  return static_cast<float>((element * 7 + parameter * 3) % 61 - 30) / 32;
}
absl::Status WriteValues(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = Written(static_cast<int>(slice.parameter), slice.begin + static_cast<int64_t>(i));
  return absl::OkStatus();
}

class StateAccessTest : public ::testing::TestWithParam<Setting> {
 protected:
  void Run(DType compute,
           const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      if (compute == DType::kFloat16 && setting.timing == Timing::kEarly) continue;
      Config config = ConfigFor(setting);
      config.compute = compute;
      config.loss_scale.initial_scale_power = 4;
      RunOn(setting, model_, config, body);
    }
  }
  ModelSpec model_ = ScriptedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, StateAccessTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

constexpr DType kComputes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// At any world and stage: the values of the parameter's own initialiser, called once for all of it.
TEST_P(StateAccessTest, FirstValuesAreTheInitialisersBitForBit) {
  ParameterValues initial;
  for (size_t p = 0; p < model_.parameters.size(); ++p) {
    const ParameterSpec& parameter = model_.parameters[p];
    std::vector<float>& values =
        initial.emplace_back(static_cast<size_t>(Elements(parameter.shape)));
    const Slice whole{.parameter = ParameterId{static_cast<int32_t>(p)},
                      .name = parameter.name,
                      .shape = parameter.shape,
                      .begin = 0,
                      .end = Elements(parameter.shape)};
    ASSERT_TRUE(parameter.init(whole, values).ok());
  }
  for (const DType compute : kComputes) {
    ParameterValues masters = initial, parameters = initial;
    for (size_t p = 0; p < initial.size(); ++p) {
      for (size_t i = 0; i < initial[p].size(); ++i) {
        parameters[p][i] = InDType(compute, initial[p][i]);
        if (!model_.parameters[p].trainable) masters[p][i] = parameters[p][i];
      }
    }
    Run(compute, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Snapshot snapshot, TakeSnapshot(engine, model_));
      EXPECT_EQ(snapshot.masters, masters);
      EXPECT_EQ(snapshot.parameters, parameters);
      for (const std::vector<float>& state : snapshot.states)
        EXPECT_EQ(state, std::vector<float>(state.size()));
      trainer.BeginStep(0, &parameters);
      Evaluation evaluation = engine.BeginEvaluation();
      for (int unit : kScriptedUnits) trainer.Look(evaluation.Forward(UnitId{unit}), unit);
      return evaluation.Finish().status();
    });
  }
}

// Slices come in declared order, in pieces of at most 4 MiB. Those of all ranks together have every
// element once.
TEST_P(StateAccessTest, ReadGivesEveryElementOnOneRank) {
  ModelSpec model;
  model.Add(model.AddUnit("small"), {.name = "few", .shape = {3}, .init = Normal(1, 1)});
  const UnitId unit = model.AddUnit("large");
  model.Add(unit, {.name = "rows", .shape = {2000, 1100}, .init = Normal(1, 1)});
  model.Add(unit, {.name = "base", .shape = {70}, .init = Normal(1, 1), .trainable = false});
  model.forward = {{.unit = UnitId{0}}, {.unit = unit}};
  for (const StateClass what :
       {StateClass::kMaster, StateClass::kParameter, StateClass::kOptimizer}) {
    std::vector<std::vector<int>> seen;  // by parameter, by element
    for (const ParameterSpec& parameter : model.parameters)
      seen.emplace_back(static_cast<size_t>(Elements(parameter.shape)));
    RunOn(GetParam(), model, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer&) {
      std::pair<int, int64_t> last{-1, 0};
      return engine.Read(
          what,
          [&](const Slice& slice, std::span<const float> values) {
            EXPECT_LE(values.size_bytes(), size_t{4} << 20);
            EXPECT_EQ(static_cast<int64_t>(values.size()), slice.end - slice.begin);
            EXPECT_EQ(slice.name, model[slice.parameter].name);
            EXPECT_EQ(Elements(slice.shape), Elements(model[slice.parameter].shape));
            const std::pair<int, int64_t> here{static_cast<int>(slice.parameter), slice.begin};
            EXPECT_LT(last, here);
            last = here;
            for (int64_t i = slice.begin; i < slice.end; ++i)
              ++seen[static_cast<size_t>(slice.parameter)][static_cast<size_t>(i)];
            return absl::OkStatus();
          },
          "exp_avg");
    });
    for (size_t p = 0; p < seen.size(); ++p) {
      const int times = what == StateClass::kOptimizer && !model.parameters[p].trainable ? 0 : 1;
      EXPECT_EQ(seen[p], std::vector<int>(seen[p].size(), times)) << model.parameters[p].name;
    }
  }
}

// After some steps masters and states are overwritten; from there on it is the engine that had them
// from the start.
TEST_P(StateAccessTest, TrainingGoesOnFromWrittenValues) {
  ModelSpec fresh = model_;
  for (ParameterSpec& parameter : fresh.parameters) parameter.init = WriteValues;
  for (const DType compute : kComputes) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      if (compute == DType::kFloat16 && setting.timing == Timing::kEarly) continue;
      Config config = ConfigFor(setting);
      config.compute = compute;
      config.loss_scale.static_scale = 16;
      config.optimizer.bias_correction = false;  // the number of steps is no state that is written
      std::vector<Snapshot> expected(static_cast<size_t>(setting.world));
      RunOn(setting, fresh, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (int number = 2; number < 4; ++number)
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number));
        EBB_ASSIGN_OR_RETURN(expected[static_cast<size_t>(trainer.rank())],
                             TakeSnapshot(engine, model_));
        return absl::OkStatus();
      });
      RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (int number = 0; number < 2; ++number)
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number));
        EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, WriteValues));
        for (const char* state : {"exp_avg", "exp_avg_sq"})
          EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Constant(0), state));
        EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                             GatherAll(engine, model_, StateClass::kMaster));
        for (size_t p = 0; p < masters.size(); ++p) {
          for (size_t i = 0; i < masters[p].size(); ++i)
            EXPECT_EQ(masters[p][i], Written(static_cast<int>(p), static_cast<int64_t>(i)));
        }
        for (int number = 2; number < 4; ++number)
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number));
        EBB_ASSIGN_OR_RETURN(const Snapshot snapshot, TakeSnapshot(engine, model_));
        EXPECT_EQ(snapshot, expected[static_cast<size_t>(trainer.rank())])
            << setting << " " << Name(compute);
        return absl::OkStatus();
      });
    }
  }
}

// Own clipping: the update takes gradients written between Reduce and Finish, and the report has
// their norm.
TEST_P(StateAccessTest, TheUpdateTakesWrittenGradients) {
  for (const DType compute : kComputes) {
    for (const Setting& setting : At(GetParam(), kNotEarly)) {
      Config config = ConfigFor(setting);
      config.compute = compute;
      config.gradient_clipping = 0;
      config.communication = DType::kFloat32;
      config.loss_scale.initial_scale_power = 4;
      config.optimizer = {.type = OptimizerType::kSgd, .learning_rate = 0.25};
      RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        EXPECT_EQ(engine.Write(StateClass::kGradient, WriteValues).code(), kPrecondition);
        EBB_ASSIGN_OR_RETURN(ParameterValues masters,
                             GatherAll(engine, model_, StateClass::kMaster));
        Step step = engine.BeginStep({.hold_updates = true});
        trainer.Round(step);
        EXPECT_EQ(engine.Write(StateClass::kGradient, WriteValues).code(), kPrecondition);
        EBB_RETURN_IF_ERROR(step.Reduce());
        EBB_RETURN_IF_ERROR(engine.Write(StateClass::kGradient, WriteValues));
        EBB_ASSIGN_OR_RETURN(const ParameterValues back,
                             ReadSlices(engine, model_, StateClass::kGradient));
        double squares = 0;
        for (size_t p = 0; p < masters.size(); ++p) {
          for (size_t i = 0; i < masters[p].size() && model_.parameters[p].trainable; ++i) {
            const float gradient = Written(static_cast<int>(p), static_cast<int64_t>(i));
            EXPECT_TRUE(std::isnan(back[p][i]) || back[p][i] == gradient);
            masters[p][i] = std::fma(-0.25f, gradient, masters[p][i]);
            squares += double{gradient} * gradient;
          }
        }
        EBB_RETURN_IF_ERROR(step.Finish());
        EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
        EXPECT_NEAR(report.gradient_norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
        EXPECT_EQ(*GatherAll(engine, model_, StateClass::kMaster), masters)
            << setting << " " << Name(compute);
        return absl::OkStatus();
      });
    }
  }
}

// A NaN is a value like any other until a gradient has it: then the step is skipped.
TEST_P(StateAccessTest, NaNIsReadBackAndAsAGradientSkipsTheStep) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  RunOn(GetParam(), model_, ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
          Step step = engine.BeginStep({.hold_updates = true});
          trainer.Round(step);
          EBB_RETURN_IF_ERROR(step.Reduce());
          EBB_RETURN_IF_ERROR(engine.Write(StateClass::kGradient, Constant(nan)));
          EBB_RETURN_IF_ERROR(step.Finish());
          EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
          EXPECT_FALSE(report.applied);
          EXPECT_EQ(report.skipped_steps, 1);
          EXPECT_EQ(*TakeSnapshot(engine, model_), before);
          EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, Constant(nan)));
          EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                               GatherAll(engine, model_, StateClass::kMaster));
          for (const std::vector<float>& values : masters) {
            for (float value : values) EXPECT_TRUE(std::isnan(value));
          }
          return absl::OkStatus();
        });
}

TEST(GatherOfALargeParameter, ComesInPieces) {
  ModelSpec model;
  const UnitId unit = model.AddUnit("unit");
  const int64_t elements = 3 * (int64_t{1} << 18) + 5;
  const ParameterId p = model.Add(
      unit, {.name = "p", .shape = {elements}, .init = [](const Slice& slice, std::span<float> v) {
               for (size_t i = 0; i < v.size(); ++i)
                 v[i] = static_cast<float>(slice.begin + static_cast<int64_t>(i));
               return absl::OkStatus();
             }});
  model.forward.push_back({.unit = unit});
  const absl::Status status = RunThreads(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model,
                                                       ConfigFor({.world = 2, .stage = 3})));
    int64_t next = 0;
    int pieces = 0;
    const auto look = [&](const Slice& piece, std::span<const float> values) {
      EXPECT_EQ(piece.begin, next);
      EXPECT_LE(values.size_bytes(), size_t{1} << 20);
      for (float value : values) EXPECT_EQ(value, static_cast<float>(next++));
      ++pieces;
      return absl::OkStatus();
    };
    EBB_RETURN_IF_ERROR(engine.Gather(p, StateClass::kMaster, look));
    EXPECT_EQ(next, elements);
    EXPECT_EQ(pieces, 4);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::testing::state_access_test
