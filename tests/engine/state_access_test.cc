// Reading, writing and gathering state: the slices and values, the times at which it is allowed,
// and its errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/ranks.h"
#include "tests/status.h"

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
INSTANTIATE_TEST_SUITE_P(Cells, StateAccessTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 0})), NameOf);

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
    ASSERT_OK(parameter.init(whole, values));
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

// Slices come in declared order, in pieces of at most 4 MiB. Slices of all ranks together have
// every element once.
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
      ASSERT_OK(engine.Read(
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
          "exp_avg"));
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
      RunOn(setting, fresh, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        for (int number = 2; number < 4; ++number) ASSERT_OK(TrainStep(engine, trainer, number));
        ASSERT_OK_AND_ASSIGN(expected[static_cast<size_t>(trainer.rank())],
                             TakeSnapshot(engine, model_));
      });
      RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        for (int number = 0; number < 2; ++number) ASSERT_OK(TrainStep(engine, trainer, number));
        ASSERT_OK(engine.Write(StateClass::kMaster, WriteValues));
        for (const char* state : {"exp_avg", "exp_avg_sq"})
          ASSERT_OK(engine.Write(StateClass::kOptimizer, Constant(0), state));
        ASSERT_OK_AND_ASSIGN(const ParameterValues masters,
                             GatherAll(engine, model_, StateClass::kMaster));
        for (size_t p = 0; p < masters.size(); ++p) {
          for (size_t i = 0; i < masters[p].size(); ++i)
            EXPECT_EQ(masters[p][i], Written(static_cast<int>(p), static_cast<int64_t>(i)));
        }
        for (int number = 2; number < 4; ++number) ASSERT_OK(TrainStep(engine, trainer, number));
        ASSERT_OK_AND_ASSIGN(const Snapshot snapshot, TakeSnapshot(engine, model_));
        EXPECT_EQ(snapshot, expected[static_cast<size_t>(trainer.rank())])
            << setting << " " << Name(compute);
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
      RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        EXPECT_EQ(engine.Write(StateClass::kGradient, WriteValues).code(), kPrecondition);
        ASSERT_OK_AND_ASSIGN(ParameterValues masters,
                             GatherAll(engine, model_, StateClass::kMaster));
        Step step = engine.BeginStep({.hold_updates = true});
        trainer.Round(step);
        EXPECT_EQ(engine.Write(StateClass::kGradient, WriteValues).code(), kPrecondition);
        ASSERT_OK(step.Reduce());
        ASSERT_OK(engine.Write(StateClass::kGradient, WriteValues));
        ASSERT_OK_AND_ASSIGN(const ParameterValues back,
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
        ASSERT_OK(step.Finish());
        ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
        EXPECT_NEAR(report.gradient_norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
        EXPECT_EQ(*GatherAll(engine, model_, StateClass::kMaster), masters)
            << setting << " " << Name(compute);
      });
    }
  }
}

// Gathered, every state of a parameter is whole, and a write of one parameter leaves the others.
TEST_P(StateAccessTest, AnyStateOfOneParameterIsGatheredAndWritten) {
  const ParameterId p{0};
  const size_t elements = static_cast<size_t>(Elements(model_[p].shape));
  for (const DType compute : {DType::kFloat32, DType::kFloat16}) {
    Run(compute, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
      EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
      std::vector<float> written(elements), whole(elements);
      for (size_t i = 0; i < elements; ++i) written[i] = Written(0, static_cast<int64_t>(i));
      for (const char* state : {"", "exp_avg_sq"}) {
        const StateClass what = *state == 0 ? StateClass::kMaster : StateClass::kOptimizer;
        EBB_RETURN_IF_ERROR(engine.Write(p, what, WriteValues, state));
        EBB_RETURN_IF_ERROR(engine.Gather(p, what, whole, /*root=*/-1, state));
        EXPECT_EQ(whole, written) << state;
      }
      EBB_ASSIGN_OR_RETURN(Snapshot after, TakeSnapshot(engine, model_));
      after.masters[0] = before.masters[0];
      after.parameters[0] = before.parameters[0];
      EXPECT_EQ(after.masters, before.masters);
      EXPECT_EQ(after.parameters, before.parameters);

      Step step = engine.BeginStep({.hold_updates = true});
      trainer.Round(step);
      EBB_RETURN_IF_ERROR(step.Reduce());
      EBB_RETURN_IF_ERROR(engine.Write(p, StateClass::kGradient, WriteValues));
      EBB_RETURN_IF_ERROR(engine.Gather(p, StateClass::kGradient, whole));
      for (float& value : written) value = value / 16 * 16;  // through the loss scale
      EXPECT_EQ(whole, written);
      int64_t own = 0;
      const auto count = [&](const Slice& slice, std::span<const float>) {
        EXPECT_EQ(slice.parameter, p);
        own += slice.end - slice.begin;
        return absl::OkStatus();
      };
      EBB_RETURN_IF_ERROR(engine.Read(p, StateClass::kGradient, count));
      EXPECT_LE(own, std::ssize(whole));
      return step.Finish();
    });
  }
}

// A NaN is a value like any other until a gradient has it: then the step is skipped.
TEST_P(StateAccessTest, NaNIsReadBackAndAsAGradientSkipsTheStep) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  RunOn(GetParam(), model_, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model_));
    Step step = engine.BeginStep({.hold_updates = true});
    trainer.Round(step);
    ASSERT_OK(step.Reduce());
    ASSERT_OK(engine.Write(StateClass::kGradient, Constant(nan)));
    ASSERT_OK(step.Finish());
    ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.skipped_steps, 1);
    EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    ASSERT_OK(engine.Write(StateClass::kMaster, Constant(nan)));
    ASSERT_OK_AND_ASSIGN(const ParameterValues masters,
                         GatherAll(engine, model_, StateClass::kMaster));
    for (const std::vector<float>& values : masters) {
      for (float value : values) EXPECT_TRUE(std::isnan(value));
    }
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
  OnThreads(2, [&](World world) {
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model,
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
    ASSERT_OK(engine.Gather(p, StateClass::kMaster, look));
    EXPECT_EQ(next, elements);
    EXPECT_EQ(pieces, 4);
  });
}

// Requests for state that cannot be met: a Status on every rank that says what is wrong and what is
// right, and no change.

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

absl::Status Ignore(const Slice&, std::span<const float>) {
  return absl::OkStatus();
}

class StateRefusalTest : public ::testing::TestWithParam<Setting> {
 protected:
  void Run(const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body) {
    for (const Setting& setting : At(GetParam(), kTimings))
      RunOn(setting, model_, ConfigFor(setting), body);
  }
  ModelSpec model_ = ScriptedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, StateRefusalTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 2})), NameOf);

TEST_P(StateRefusalTest, NamesTheError) {
  struct Refusal {
    std::function<absl::Status(Engine& engine)> request;
    absl::StatusCode code;
    const char* what;
  };
  std::vector<float> whole(11 * 9), small(3);
  const Refusal refusals[] = {
      {[](Engine& e) { return e.Read(StateClass::kOptimizer, Ignore, "velocity"); }, kInvalid,
       "no state 'velocity'; it has exp_avg, exp_avg_sq"},
      {[](Engine& e) { return e.Write(StateClass::kOptimizer, Constant(0)); }, kInvalid,
       "no state ''; it has exp_avg, exp_avg_sq"},
      {[](Engine& e) { return e.Write(StateClass::kMaster, {}); }, kInvalid,
       "without a source of values"},
      {[](Engine& e) { return e.Read(StateClass::kGather, Ignore); }, kInvalid,
       "'gather' cannot be read or written; parameter, master, gradient and optimizer can"},
      {[](Engine& e) { return e.Write(StateClass::kWorkspace, Constant(0)); }, kInvalid,
       "'workspace' cannot be read or written"},
      {[](Engine& e) { return e.Read(StateClass::kGradient, Ignore); }, kPrecondition,
       "between Step::Reduce and Step::Finish only"},
      {[](Engine& e) { return e.Write(StateClass::kGradient, Constant(0)); }, kPrecondition,
       "between Step::Reduce and Step::Finish only"},
      {[](Engine& e) {
         return e.Read(StateClass::kMaster, [](const Slice&, std::span<const float>) {
           return absl::DataLossError("the disk is full");
         });
       },
       absl::StatusCode::kDataLoss, "the disk is full"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{99}, StateClass::kMaster, own);
       },
       kInvalid, "parameter 99: the model has 9"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{-1}, StateClass::kMaster, own);
       },
       kInvalid, "parameter -1: the model has 9"},
      {[&](Engine& e) {
         std::vector<float> own(small.size());
         return e.Gather(ParameterId{0}, StateClass::kMaster, own);
       },
       kInvalid, "Gather of 'embedding' into 3 elements: it has 99"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{0}, StateClass::kOptimizer, own);
       },
       kInvalid, "no state ''; it has exp_avg, exp_avg_sq"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{0}, StateClass::kGradient, own);
       },
       kPrecondition, "between Step::Reduce and Step::Finish only"},
      {[](Engine& e) { return e.Read(ParameterId{9}, StateClass::kMaster, Ignore); }, kInvalid,
       "parameter 9: the model has 9"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{0}, StateClass::kMaster, own, /*root=*/3);
       },
       kInvalid, "Gather to root 3 in a world of"},
  };
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
    for (const Refusal& refusal : refusals) {
      const absl::Status status = refusal.request(engine);
      EXPECT_THAT(status, StatusIs(refusal.code, refusal.what));
    }
    EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    return TrainStep(engine, trainer, 1);
  });
}

// A buffer that is too small on one rank is an error on all ranks, without a wait for that rank.
TEST_P(StateRefusalTest, AGatherWithoutRoomOnOneRankFailsOnAll) {
  const int culprit = GetParam().world - 1;
  Run([&](Engine& engine, ScriptedTrainer& trainer) {
    std::vector<float> whole(trainer.rank() == culprit ? 98 : 99);
    const absl::Status status = engine.Gather(ParameterId{0}, StateClass::kMaster, whole);
    EXPECT_THAT(status, StatusIs(kInvalid, "into 98 elements: it has 99"));
    return TrainStep(engine, trainer, 0);
  });
}

TEST_P(StateRefusalTest, GatherToARootLeavesTheOthersAlone) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    for (const StateClass what : {StateClass::kMaster, StateClass::kParameter}) {
      EBB_ASSIGN_OR_RETURN(const ParameterValues everywhere, GatherAll(engine, model_, what));
      for (int root = 0; root < GetParam().world; ++root) {
        for (size_t p = 0; p < everywhere.size(); ++p) {
          const bool receives = trainer.rank() == root;
          std::vector<float> whole(receives ? everywhere[p].size() : 0);
          EBB_RETURN_IF_ERROR(
              engine.Gather(ParameterId{static_cast<int32_t>(p)}, what, whole, root));
          EXPECT_EQ(whole, receives ? everywhere[p] : std::vector<float>());
          whole.clear();
          const auto append = [&](const Slice& piece, std::span<const float> values) {
            EXPECT_EQ(piece.name, model_.parameters[p].name);
            EXPECT_EQ(piece.begin, std::ssize(whole));
            EXPECT_EQ(piece.end - piece.begin, std::ssize(values));
            whole.insert(whole.end(), values.begin(), values.end());
            return absl::OkStatus();
          };
          EBB_RETURN_IF_ERROR(
              engine.Gather(ParameterId{static_cast<int32_t>(p)}, what, append, root));
          EXPECT_EQ(whole, receives ? everywhere[p] : std::vector<float>());
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(StateRefusalTest, AnErrorOfASinkIsTheErrorOfItsRank) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    int pieces = 0;
    const auto refuse = [&](const Slice&, std::span<const float>) {
      ++pieces;
      return absl::CancelledError("enough");
    };
    const absl::Status status =
        engine.Gather(ParameterId{0}, StateClass::kMaster, refuse, /*root=*/0);
    EXPECT_EQ(pieces, trainer.rank() == 0 ? 1 : 0);
    EXPECT_EQ(status, trainer.rank() == 0 ? absl::CancelledError("enough") : absl::OkStatus());
    return TrainStep(engine, trainer, 0);
  });
}

// For all classes but gradients, while a Step or Evaluation is alive. Reading and gathering are
// legal then.
TEST_P(StateRefusalTest, NothingIsWrittenInsideAStepOrEvaluation) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
    const auto refuse = [&] {
      for (const absl::Status& status :
           {engine.Write(StateClass::kMaster, Constant(0)),
            engine.Write(StateClass::kParameter, Constant(0)),
            engine.Write(StateClass::kOptimizer, Constant(1), "exp_avg")}) {
        EXPECT_THAT(status, StatusIs(kPrecondition, "Write while a Step or Evaluation is alive"));
      }
      EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    };
    {
      Step step = engine.BeginStep();
      refuse();
      trainer.ForwardAll(step);
      refuse();
    }
    {
      Evaluation evaluation = engine.BeginEvaluation();
      evaluation.Forward(UnitId{0});
      refuse();
    }
    EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    return TrainStep(engine, trainer, 0);
  });
}

// A Write may fail after some slices, and on one rank only: the ranks stay together, and a Write
// that succeeds makes it good.
TEST_P(StateRefusalTest, AWriteThatFailsAtItsSourceOnOneRankCanBeRepeated) {
  const int culprit = GetParam().world - 1;
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    const Initialiser fails = [&](const Slice& slice, std::span<float> values) {
      if (trainer.rank() == culprit && slice.name >= "norm")
        return absl::DataLossError("cut short");
      return Constant(0.5f)(slice, values);
    };
    const absl::Status status = engine.Write(StateClass::kMaster, fails);
    EXPECT_EQ(status.ok(), trainer.rank() != culprit) << status;
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, Constant(0.25f)));
    ParameterValues quarter;
    for (const ParameterSpec& parameter : model_.parameters)
      quarter.emplace_back(static_cast<size_t>(Elements(parameter.shape)), 0.25f);
    trainer.BeginStep(1, &quarter);
    Step step = engine.BeginStep();
    trainer.Round(step);
    return step.Finish();
  });
}

TEST(MovedFromEngineTest, RefusesEverything) {
  const ModelSpec model = ScriptedModel();
  absl::StatusOr<Engine> made =
      Engine::Create(World::Single(), Device::Cpu(), model, ConfigFor({}));
  ASSERT_OK(made);
  Engine from = *std::move(made);
  const Engine to = std::move(from);
  std::vector<float> whole(11 * 9);
  for (const absl::Status& status :
       {from.BeginStep().Finish(), from.BeginEvaluation().Finish().status(), from.Report().status(),
        from.Read(StateClass::kMaster, Ignore), from.Write(StateClass::kMaster, Constant(0)),
        from.Gather(ParameterId{0}, StateClass::kMaster, whole)}) {
    EXPECT_EQ(status.code(), kPrecondition) << status;
  }
  EXPECT_TRUE(from.memory().empty());
  EXPECT_TRUE(from.communication().empty());
  EXPECT_TRUE(from.optimizer_states(ParameterId{0}).empty());
  EXPECT_FALSE(to.memory().empty());
  EXPECT_EQ(to.optimizer_states(ParameterId{0}).size(), 2u);
  for (const int no_parameter : {-1, static_cast<int>(model.parameters.size())})
    EXPECT_TRUE(to.optimizer_states(static_cast<ParameterId>(no_parameter)).empty());
}

}  // namespace
}  // namespace ebb::testing::state_access_test
