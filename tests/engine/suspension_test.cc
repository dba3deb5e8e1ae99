// Suspend and Resume: the same bits as without them, in every setting, and the calls that a
// suspended engine still answers.
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::suspension_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Every step and every number that a run of the toy model ends with.
struct Outcome {
  std::vector<double> reports;
  std::vector<uint32_t> masters;
  std::vector<uint32_t> states;  // this rank's
  double evaluation = 0;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

struct Cell {
  Setting setting;
  DType dtype = DType::kFloat32;
  int64_t prefetch = 1;
  int64_t shard_group = 0;
  bool boundaries = false;
};

Config ConfigOf(const Cell& cell) {
  Config config = ConfigFor(cell.setting);
  config.compute = cell.dtype;
  config.ebb.prefetch_depth = cell.prefetch;
  config.ebb.shard_group = cell.shard_group;
  config.gradient_accumulation_steps = 2;
  config.loss_scale.initial_scale_power = 8;
  return config;
}

enum class Between { kNothing, kSuspension, kTwoSuspensions };

std::vector<Outcome> RunCell(const Cell& cell, Between between) {
  std::vector<Outcome> outcomes(static_cast<size_t>(cell.setting.world));
  const absl::Status status = RunThreads(cell.setting.world, [&](World world) -> absl::Status {
    ToyModel model({.boundaries = cell.boundaries});
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model.spec(), ConfigOf(cell)));
    Outcome& outcome = outcomes[static_cast<size_t>(world.rank())];
    for (int step = 0; step < 4; ++step) {
      const bool held = step % 2 == 1;  // of a plan made on the way
      EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), step, {.hold_updates = held}));
      // At once, so that late updates are still on their way.
      for (int n = 0; n < static_cast<int>(between); ++n) {
        EBB_RETURN_IF_ERROR(engine.Suspend());
        EBB_RETURN_IF_ERROR(engine.Resume());
      }
      EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
      for (double number :
           {report.loss, report.gradient_norm, report.loss_scale, static_cast<double>(report.step)})
        outcome.reports.push_back(number);
    }
    EBB_ASSIGN_OR_RETURN(outcome.evaluation, model.Evaluate(engine, world.rank()));
    EBB_ASSIGN_OR_RETURN(outcome.masters, MasterBits(engine, model.spec()));
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      EBB_RETURN_IF_ERROR(engine.Read(
          StateClass::kOptimizer,
          [&](const Slice&, std::span<const float> values) {
            for (float value : values) outcome.states.push_back(std::bit_cast<uint32_t>(value));
            return absl::OkStatus();
          },
          state));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << cell.setting << ": " << status;
  return outcomes;
}

class SuspensionTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, SuspensionTest, ::testing::ValuesIn(WorldsAndStages({1, 2, 4})),
                         NameOf);

TEST_P(SuspensionTest, ChangesNoBit) {
  int number = 0;
  for (const DType dtype : kDTypes) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      constexpr int64_t kDepths[] = {0, 1, std::numeric_limits<int64_t>::max()};
      Cell cell{.setting = setting,
                .dtype = dtype,
                .prefetch = kDepths[number++ % 3],
                .boundaries = number % 2 == 0};
      if (setting.world == 4 && setting.stage > 0 && number % 2 == 1) cell.shard_group = 2;
      SCOPED_TRACE(::testing::Message()
                   << setting << ", " << std::string(Name(dtype)) << ", prefetch " << cell.prefetch
                   << ", shard group " << cell.shard_group);
      const std::vector<Outcome> plain = RunCell(cell, Between::kNothing);
      EXPECT_TRUE(plain == RunCell(cell, Between::kSuspension));
      if (number % 4 == 0) {
        EXPECT_TRUE(plain == RunCell(cell, Between::kTwoSuspensions));
      }
    }
  }
}

TEST_P(SuspensionTest, StateIsReadWrittenAndGatheredMeanwhile) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(GetParam());
  config.compute = DType::kBFloat16;
  RunOn(GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model));
    EBB_RETURN_IF_ERROR(engine.Suspend());
    EBB_ASSIGN_OR_RETURN(const Snapshot meanwhile, TakeSnapshot(engine, model));
    EXPECT_EQ(meanwhile, before);
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, Constant(0.375f)));
    EBB_RETURN_IF_ERROR(engine.Resume());
    Evaluation evaluation = engine.BeginEvaluation();
    for (const Visit& visit : model.forward) {
      const ForwardScope scope = evaluation.Forward(visit.unit);
      for (ParameterId p : model[visit.unit].parameters) {
        const std::vector<float> values = Values(scope.parameter(p));
        EXPECT_EQ(values, std::vector<float>(values.size(), 0.375f)) << model[p].name;
        EXPECT_FALSE(values.empty());
      }
    }
    return evaluation.Finish().status();
  });
}

TEST_P(SuspensionTest, OnceMoreIsTheSame) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam(), model, ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
          EBB_RETURN_IF_ERROR(engine.Resume());
          EBB_RETURN_IF_ERROR(engine.Suspend());
          const std::vector<MemoryRow> suspended = engine.memory();
          EBB_RETURN_IF_ERROR(engine.Suspend());
          for (size_t i = 0; i < suspended.size(); ++i)
            EXPECT_EQ(engine.memory()[i].current_bytes, suspended[i].current_bytes);
          EBB_RETURN_IF_ERROR(engine.Resume());
          EBB_RETURN_IF_ERROR(engine.Resume());
          return TrainStep(engine, trainer, 0);
        });
}

// Off the declared order, collectives use pointers of their own.
TEST_P(SuspensionTest, AStepOffTheDeclaredOrderFindsTheNewPools) {
  const ModelSpec model = ScriptedModel();
  std::vector<Snapshot> ends[2];
  for (const bool suspends : {false, true}) {
    ends[suspends].resize(static_cast<size_t>(GetParam().world));
    RunOn(GetParam(), model, ConfigFor(GetParam()),
          [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
            if (suspends) {
              EBB_RETURN_IF_ERROR(engine.Suspend());
              EBB_RETURN_IF_ERROR(engine.Resume());
            }
            trainer.BeginStep(1, nullptr);
            Step step = engine.BeginStep(kExactStep);
            for (int unit : {3, 0, 1, 2, 4}) trainer.Forward(step, unit);
            trainer.BackwardAll(step);
            EBB_RETURN_IF_ERROR(step.Finish());
            EBB_ASSIGN_OR_RETURN(ends[suspends][static_cast<size_t>(trainer.rank())],
                                 TakeSnapshot(engine, model));
            return absl::OkStatus();
          });
  }
  EXPECT_EQ(ends[0], ends[1]);
}

}  // namespace
}  // namespace ebb::testing::suspension_test
