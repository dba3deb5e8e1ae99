// What a run is beside its tensors, read and set. That a resumed run has the bits of one that was
// never interrupted is shown by the matrix ("between another engine").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing::training_state_test {
namespace {

using ::testing::HasSubstr;

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
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    for (int64_t step = 0; step < 3; ++step) {
      EBB_ASSIGN_OR_RETURN(const TrainingState state, engine.training_state());
      EXPECT_EQ(state, (TrainingState{.finished_steps = step,
                                      .applied_steps = step,
                                      .loss_scaler = state.loss_scaler}));
      EXPECT_EQ(state.loss_scaler.scale, 1);
      EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, step));
    }
    return absl::OkStatus();
  });
}

TEST_P(TrainingStateTest, TheNextStepFollowsTheOneThatWasSet) {
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    const TrainingState set = {.finished_steps = 12, .applied_steps = 10, .skipped_steps = 2};
    EBB_RETURN_IF_ERROR(engine.SetTrainingState(set));
    EBB_ASSIGN_OR_RETURN(const TrainingState state, engine.training_state());
    EXPECT_EQ(state.finished_steps, 12);
    EXPECT_EQ(state.applied_steps, 10);
    EXPECT_EQ(state.skipped_steps, 2);
    const absl::StatusOr<StepReport> none = engine.Report();
    EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition) << none.status();
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 1));
    EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
    EXPECT_EQ(report.step, 13);
    EXPECT_EQ(report.skipped_steps, 2);
    return absl::OkStatus();
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
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    for (const TrainingState& wrong : kWrong) {
      // An error of one rank: all get it, and nothing is set.
      const absl::Status status =
          engine.SetTrainingState(trainer.rank() == 0 ? wrong : TrainingState());
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("a training state "));
    }
    EBB_ASSIGN_OR_RETURN(const TrainingState state, engine.training_state());
    EXPECT_EQ(state.finished_steps, 0);
    return TrainStep(engine, trainer, 0);
  });
}

TEST_P(TrainingStateTest, DifferentOnesAreRefusedOnEveryRank) {
  if (GetParam().world == 1) return;
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    const TrainingState mine = {.finished_steps = trainer.rank(), .applied_steps = trainer.rank()};
    const absl::Status status = engine.SetTrainingState(mine);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 differs from rank 0"));
    return TrainStep(engine, trainer, 0);
  });
}

TEST_P(TrainingStateTest, BelongsBetweenSteps) {
  RunOn(GetParam(), model_, config_, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    {
      Evaluation evaluation = engine.BeginEvaluation();
      const absl::Status status = engine.SetTrainingState(TrainingState());
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(engine.training_state().ok());
      for (const int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
      EBB_RETURN_IF_ERROR(evaluation.Finish().status());
    }
    // A suspended engine has it too.
    EBB_RETURN_IF_ERROR(engine.Suspend());
    EBB_RETURN_IF_ERROR(engine.SetTrainingState({.finished_steps = 5, .applied_steps = 5}));
    EBB_RETURN_IF_ERROR(engine.Resume());
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const TrainingState state, engine.training_state());
    EXPECT_EQ(state.finished_steps, 6);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace ebb::testing::training_state_test
