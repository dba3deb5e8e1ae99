// State that passes through the staging between disk and host: more than a slot holds, and with a
// read running while a sink or a source has the values of another slot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/state_pieces.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::state_transfer_test {
namespace {

constexpr Setting kSetting = {.world = 2, .stage = 3};

struct Masters {
  const char* name;
  DType compute = DType::kBFloat16;
  bool split = false;
};
void PrintTo(const Masters& masters, std::ostream* out) {
  *out << masters.name;
}

// Three runs a rank, and sub-groups that end within them.
ModelSpec LargeModel() {
  ModelSpec model;
  model.Add(model.AddUnit("small"), {.name = "few", .shape = {3}, .init = Normal(1, 1)});
  const UnitId unit = model.AddUnit("large");
  model.Add(unit, {.name = "rows", .shape = {4100, 1100}, .init = Normal(1, 1)});
  model.Add(unit, {.name = "odd", .shape = {12'345}, .init = Normal(1, 1)});
  model.Add(unit, {.name = "base", .shape = {70}, .init = Normal(1, 1), .trainable = false});
  model.forward = {{.unit = UnitId{0}}, {.unit = unit}};
  return model;
}

absl::Status Written(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((slice.begin + static_cast<int64_t>(i)) % 127 - 63);
  return absl::OkStatus();
}

class StagedStateTest : public ::testing::TestWithParam<Masters> {
 protected:
  void Run(const std::function<absl::Status(Engine& engine)>& body) {
    Config config = OnNvme(ConfigFor(kSetting), scratch_.path());
    config.compute = GetParam().compute;
    config.ebb.split_master = GetParam().split;
    config.zero.sub_group_size = 700'000;
    config.zero.offload_param.max_in_cpu = 0;
    RunOn(kSetting, model_, config,
          [&](Engine& engine, ScriptedTrainer&) { ASSERT_OK(body(engine)); });
  }
  // This rank's, in the order in which they come; `between` is called with each.
  absl::StatusOr<std::vector<float>> Values(
      Engine& engine, StateClass what,
      absl::FunctionRef<absl::Status()> between = [] { return absl::OkStatus(); }) {
    std::vector<float> all;
    EBB_RETURN_IF_ERROR(engine.Read(
        what,
        [&](const Slice&, std::span<const float> values) {
          all.insert(all.end(), values.begin(), values.end());
          return between();
        },
        what == StateClass::kOptimizer ? "exp_avg" : ""));
    return all;
  }

  const Scratch scratch_;
  const ModelSpec model_ = LargeModel();
};
INSTANTIATE_TEST_SUITE_P(Kinds, StagedStateTest,
                         ::testing::Values(Masters{.name = "fp32", .compute = DType::kFloat32},
                                           Masters{.name = "bf16"},
                                           Masters{.name = "split", .split = true}),
                         [](const auto& of) { return std::string(of.param.name); });

TEST_P(StagedStateTest, SinksAndSourcesMayReadOtherState) {
  Run([&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Written, "exp_avg"));
    EBB_ASSIGN_OR_RETURN(const std::vector<float> masters, Values(engine, StateClass::kMaster));
    EBB_ASSIGN_OR_RETURN(const std::vector<float> states, Values(engine, StateClass::kOptimizer));
    const auto states_again = [&]() -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const std::vector<float> again, Values(engine, StateClass::kOptimizer));
      EXPECT_TRUE(again == states);
      return absl::OkStatus();
    };
    EBB_ASSIGN_OR_RETURN(const std::vector<float> between,
                         Values(engine, StateClass::kMaster, states_again));
    EXPECT_TRUE(between == masters);
    EBB_RETURN_IF_ERROR(
        engine.Write(StateClass::kMaster, [&](const Slice& slice, std::span<float> values) {
          const absl::Status read = states_again();
          return read.ok() ? Written(slice, values) : read;
        }));
    std::vector<float> written;
    EBB_RETURN_IF_ERROR(
        engine.Read(StateClass::kMaster, [&](const Slice& slice, std::span<const float> values) {
          written.resize(values.size());
          EXPECT_OK(Written(slice, written));
          EXPECT_TRUE(std::equal(values.begin(), values.end(), written.begin())) << slice.begin;
          return absl::OkStatus();
        }));
    return absl::OkStatus();
  });
}

// The read of the next values is on its way when a sink has had enough.
TEST_P(StagedStateTest, AWriteAfterASinkGaveUpIsReadBack) {
  Run([&](Engine& engine) -> absl::Status {
    for (int calls = 1; calls <= 3; ++calls) {
      int seen = 0;
      const absl::Status enough =
          engine.Read(StateClass::kMaster, [&](const Slice&, std::span<const float>) {
            return ++seen < calls ? absl::OkStatus() : absl::CancelledError("enough");
          });
      EXPECT_EQ(enough, absl::CancelledError("enough"));
      const auto other = [&](const Slice& slice, std::span<float> values) {
        const absl::Status status = Written(slice, values);
        for (float& value : values) value += static_cast<float>(calls);
        return status;
      };
      EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, other));
      std::vector<float> expected;
      EBB_RETURN_IF_ERROR(
          engine.Read(StateClass::kMaster, [&](const Slice& slice, std::span<const float> values) {
            expected.resize(values.size());
            EXPECT_OK(other(slice, expected));
            EXPECT_TRUE(std::equal(values.begin(), values.end(), expected.begin())) << calls;
            return absl::OkStatus();
          }));
    }
    return absl::OkStatus();
  });
}

// On each tier: also the staging through which state on the disk passes.
TEST(PredictedMemoryTest, IsCounted) {
  const Scratch scratch;
  const ModelSpec model = ScriptedModel();
  constexpr Tier kTiersOfState[] = {Tier::kDevice, Tier::kCpu, Tier::kNvme};
  for (const Tier parameters : kTiersOfState) {
    for (const Tier states : kTiersOfState) {
      SCOPED_TRACE(::testing::Message() << "parameters on tier " << static_cast<int>(parameters)
                                        << ", states on " << static_cast<int>(states));
      Config config = OnNvme(ConfigFor(kSetting), scratch.path());
      config.zero.offload_param.device = parameters;
      config.zero.offload_optimizer.device = states;
      RunOn(kSetting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        for (const int64_t step : {0, 1, 2}) ASSERT_OK(TrainStep(engine, trainer, step));
        ASSERT_OK(engine.Report().status());
        ASSERT_OK_AND_ASSIGN(const auto predicted,
                             PredictMemory(model, kSetting.world, engine.config()));
        const std::vector<MemoryRow> counted = engine.memory();
        EXPECT_EQ(counted.size(), predicted.size());
        for (const MemoryRow& row : counted) {
          const auto same = std::find_if(
              predicted.begin(), predicted.end(),
              [&](const MemoryRow& of) { return of.state == row.state && of.tier == row.tier; });
          const uint64_t bytes = same == predicted.end() ? 0 : same->predicted_bytes;
          SCOPED_TRACE(::testing::Message() << Name(row.state) << " on " << Name(row.tier));
          EXPECT_EQ(row.current_bytes, bytes);
          EXPECT_EQ(row.peak_bytes, bytes);
          EXPECT_EQ(row.predicted_bytes, bytes);
        }
      });
    }
  }
}

// Values that rank 0 gives for all ranks: drawn in turn, or known to it alone.

// Each element is the generator's next, whatever its name and index: a hidden state, which no other
// source may have.
ModelSpec DrawnInTurn(const std::shared_ptr<std::mt19937>& generator) {
  ModelSpec model = ScriptedModel();
  for (ParameterSpec& parameter : model.parameters) {
    parameter.init = [generator](const Slice&, std::span<float> values) -> absl::Status {
      if (generator == nullptr)
        return absl::InternalError("called on a rank that is not the first");
      for (float& value : values) value = static_cast<float>((*generator)() % 1000) / 8;
      return absl::OkStatus();
    };
  }
  return model;
}

// In the order that the option promises.
ParameterValues Drawn() {
  const ModelSpec model = ScriptedModel();
  std::mt19937 generator(7);
  ParameterValues all(model.parameters.size());
  for (const UnitSpec& unit : model.units) {
    for (const bool trainable : {true, false}) {
      for (const ParameterId p : unit.parameters) {
        if (model[p].trainable != trainable) continue;
        std::vector<float>& values = all[static_cast<size_t>(p)];
        values.resize(static_cast<size_t>(Elements(model[p].shape)));
        for (float& value : values) value = static_cast<float>(generator() % 1000) / 8;
      }
    }
  }
  return all;
}

absl::Status CreateEach(int world, const Config& config,
                        const std::function<ModelSpec(int rank)>& model,
                        const std::function<EngineOptions(int rank)>& options,
                        const std::function<absl::Status(Engine&)>& body) {
  return RunThreads(world, [&](World of) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(of, Device::Cpu(1), model(of.rank()), config,
                                                       options(of.rank())));
    return body(engine);
  });
}

class InitialValuesTest : public ::testing::TestWithParam<Setting> {
 protected:
  static std::function<ModelSpec(int)> OnRank0() {
    return [](int rank) {
      return DrawnInTurn(rank == 0 ? std::make_shared<std::mt19937>(7) : nullptr);
    };
  }
  static EngineOptions OfRank0(int /*rank*/) { return {.initial_values_of_rank_0 = true}; }
};
INSTANTIATE_TEST_SUITE_P(Cells, InitialValuesTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

TEST_P(InitialValuesTest, AreDrawnByRank0InOrder) {
  const Scratch scratch;
  for (const bool on_nvme : {false, true}) {
    Config config = ConfigFor(GetParam());
    if (on_nvme) config = OnNvme(config, scratch.path());
    ExpectOk(CreateEach(
        GetParam().world, config, OnRank0(), OfRank0, [&](Engine& engine) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(const ParameterValues parameters,
                               GatherAll(engine, engine.model(), StateClass::kParameter));
          EXPECT_EQ(parameters, Drawn());
          EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                               GatherAll(engine, engine.model(), StateClass::kMaster));
          EXPECT_EQ(masters, Drawn());
          return absl::OkStatus();
        }));
  }
}

TEST_P(InitialValuesTest, AnErrorOfRank0IsEveryRanks) {
  std::vector<std::string> errors(static_cast<size_t>(GetParam().world));
  const auto model = [](int rank) {
    ModelSpec of = DrawnInTurn(rank == 0 ? std::make_shared<std::mt19937>(7) : nullptr);
    if (rank == 0) {
      of.parameters[3].init = [](const Slice&, std::span<float>) {
        return absl::NotFoundError("no such tensor in the file");
      };
    }
    return of;
  };
  OnThreads(GetParam().world, [&](World world) {
    const auto engine = Engine::Create(world, Device::Cpu(1), model(world.rank()),
                                       ConfigFor(GetParam()), OfRank0(world.rank()));
    errors[static_cast<size_t>(world.rank())] = std::string(engine.status().message());
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("no such tensor in the file"), std::string::npos) << error;
    EXPECT_NE(error.find("'" + ScriptedModel().parameters[3].name + "'"), std::string::npos);
  }
}

TEST(InitialValuesOfRanksTest, RanksThatDoNotAllTakeThoseOfRank0AreRefused) {
  const absl::Status status = CreateEach(
      2, ConfigFor({.world = 2, .stage = 3}), [](int) { return ScriptedModel(); },
      [](int rank) { return EngineOptions{.initial_values_of_rank_0 = rank == 1}; },
      [](Engine&) { return absl::OkStatus(); });
  EXPECT_NE(status.message().find("EngineOptions::initial_values_of_rank_0 (true) on rank 1"),
            absl::string_view::npos)
      << status;
}

// The state of a run beside its tensors, read and set. The matrix ("between another engine") shows
// that a resumed run has the bits of one that was never interrupted.

constexpr Setting kSettings[] = {{.world = 1, .stage = 0},
                                 {.world = 2, .stage = 3, .timing = Timing::kEarly},
                                 {.world = 3, .stage = 2}};

class TrainingStateTest : public ::testing::TestWithParam<Setting> {
 protected:
  const ModelSpec model_ = ScriptedModel();
  const Config config_ = ConfigFor(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Cells, TrainingStateTest, ::testing::ValuesIn(kSettings), NameOf);

TEST_P(TrainingStateTest, CountsTheFinishedSteps) {
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    for (int64_t step = 0; step < 3; ++step) {
      ASSERT_OK_AND_ASSIGN(const TrainingState state, engine.training_state());
      EXPECT_EQ(state, (TrainingState{.finished_steps = step,
                                      .applied_steps = step,
                                      .loss_scaler = state.loss_scaler}));
      EXPECT_EQ(state.loss_scaler.scale, 1);
      ASSERT_OK(TrainStep(engine, trainer, step));
    }
  });
}

TEST_P(TrainingStateTest, TheNextStepFollowsTheOneThatWasSet) {
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(TrainStep(engine, trainer, 0));
    const TrainingState set = {.finished_steps = 12, .applied_steps = 10, .skipped_steps = 2};
    ASSERT_OK(engine.SetTrainingState(set));
    ASSERT_OK_AND_ASSIGN(const TrainingState state, engine.training_state());
    EXPECT_EQ(state.finished_steps, 12);
    EXPECT_EQ(state.applied_steps, 10);
    EXPECT_EQ(state.skipped_steps, 2);
    const absl::StatusOr<StepReport> none = engine.Report();
    EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition) << none.status();
    ASSERT_OK(TrainStep(engine, trainer, 1));
    ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
    EXPECT_EQ(report.step, 13);
    EXPECT_EQ(report.skipped_steps, 2);
  });
}

TEST_P(TrainingStateTest, AnImpossibleStateIsRefusedOnEveryRank) {
  const double infinite = std::numeric_limits<double>::infinity();
  const TrainingState kWrong[] = {
      {.finished_steps = 3, .applied_steps = 1, .skipped_steps = 1},
      {.finished_steps = -1, .applied_steps = -1},
      {.finished_steps = 0, .applied_steps = 1, .skipped_steps = -1},
      {.loss_scaler = {.scale = 0}},
      {.loss_scaler = {.scale = -4}},
      {.loss_scaler = {.scale = infinite}},
      {.loss_scaler = {.scale = std::numeric_limits<double>::quiet_NaN()}},
      {.loss_scaler = {.clean_steps = -1}},
      {.loss_scaler = {.hysteresis_left = -1}},
  };
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    for (const TrainingState& wrong : kWrong) {
      // An error of one rank: all get it, and nothing is set.
      const absl::Status status =
          engine.SetTrainingState(trainer.rank() == 0 ? wrong : TrainingState());
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, "a training state "));
    }
    ASSERT_OK_AND_ASSIGN(const TrainingState state, engine.training_state());
    EXPECT_EQ(state.finished_steps, 0);
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

TEST_P(TrainingStateTest, DifferentOnesAreRefusedOnEveryRank) {
  if (GetParam().world == 1) return;
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    const TrainingState mine = {.finished_steps = trainer.rank(), .applied_steps = trainer.rank()};
    const absl::Status status = engine.SetTrainingState(mine);
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kFailedPrecondition, "rank 1 differs from rank 0"));
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

TEST_P(TrainingStateTest, BelongsBetweenSteps) {
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    {
      Evaluation evaluation = engine.BeginEvaluation();
      const absl::Status status = engine.SetTrainingState(TrainingState());
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_OK(engine.training_state());
      for (const int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
      ASSERT_OK(evaluation.Finish().status());
    }
    // A suspended engine has it too.
    ASSERT_OK(engine.Suspend());
    ASSERT_OK(engine.SetTrainingState({.finished_steps = 5, .applied_steps = 5}));
    ASSERT_OK(engine.Resume());
    ASSERT_OK(TrainStep(engine, trainer, 0));
    ASSERT_OK_AND_ASSIGN(const TrainingState state, engine.training_state());
    EXPECT_EQ(state.finished_steps, 6);
  });
}

}  // namespace
}  // namespace ebb::testing::state_transfer_test
