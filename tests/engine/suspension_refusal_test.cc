// What a suspended engine refuses, when Suspend and Resume are refused, and failures on the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"
#include "tests/engine/watched_world.h"

namespace ebb::testing::suspension_refusal_test {
namespace {

using ::testing::HasSubstr;

class SuspensionRefusalTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, SuspensionRefusalTest,
                         ::testing::ValuesIn(WorldsAndStages({1, 2, 4})), NameOf);

void ExpectSuspended(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the engine 'policy' is suspended"));
}

TEST_P(SuspensionRefusalTest, StepsAndEvaluationsAreRefusedUntilResume) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam(), model, ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
          EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
          EBB_RETURN_IF_ERROR(engine.Suspend());
          EXPECT_TRUE(engine.Report().ok());  // of the step before

          Evaluation evaluation = engine.BeginEvaluation();
          EXPECT_EQ(evaluation.Forward(UnitId{0}).parameter(ParameterId{0}).data, nullptr);
          ExpectSuspended(evaluation.Finish().status());
          EXPECT_TRUE(engine.Report().ok());

          Step step = engine.BeginStep({.hold_updates = true});
          EXPECT_EQ(step.Forward(UnitId{0}).parameter(ParameterId{0}).data, nullptr);
          BackwardScope backward = step.Backward(UnitId{0});
          EXPECT_EQ(backward.gradient(ParameterId{0}).data, nullptr);
          EXPECT_TRUE(backward.micro_batches().empty());
          backward.Close();
          ExpectSuspended(step.Reduce());
          ExpectSuspended(step.Finish());
          ExpectSuspended(engine.Report().status());
          Step late = engine.BeginStep();
          { const Step dropped = engine.BeginStep(); }

          EBB_RETURN_IF_ERROR(engine.Resume());
          EBB_ASSIGN_OR_RETURN(const StepReport same, engine.Report());
          EXPECT_EQ(same.gradient_norm, report.gradient_norm);
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 1));
          ExpectSuspended(late.Finish());
          EBB_ASSIGN_OR_RETURN(const StepReport next, engine.Report());
          EXPECT_EQ(next.step, 2);
          return absl::OkStatus();
        },
        {.name = "policy"});
}

// A step or evaluation that is alive is left as it is, and ends with the bits of one undisturbed.
TEST_P(SuspensionRefusalTest, NotWhileAStepOrEvaluationIsAlive) {
  const ModelSpec model = ScriptedModel();
  std::vector<Snapshot> ends[2];
  for (const bool disturbed : {false, true}) {
    ends[disturbed].resize(static_cast<size_t>(GetParam().world));
    RunOn(GetParam(), model, ConfigFor(GetParam()),
          [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            const auto refused = [&] {
              if (!disturbed) return;
              for (const absl::Status& status : {engine.Suspend(), engine.Resume()}) {
                EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
                EXPECT_THAT(std::string(status.message()), HasSubstr("alive"));
              }
            };
            Evaluation evaluation = engine.BeginEvaluation();
            refused();
            evaluation.Forward(UnitId{0});
            refused();
            EBB_RETURN_IF_ERROR(evaluation.Finish().status());
            trainer.BeginStep(0, nullptr);
            Step step = engine.BeginStep(kExactStep);
            refused();
            trainer.ForwardAll(step);
            refused();
            trainer.BackwardAll(step);
            refused();
            EBB_RETURN_IF_ERROR(step.Finish());
            EBB_ASSIGN_OR_RETURN(ends[disturbed][static_cast<size_t>(trainer.rank())],
                                 TakeSnapshot(engine, model));
            return absl::OkStatus();
          });
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// Whichever collective fails on one rank, every rank gets a Status, and is suspended or is not.
TEST(SuspensionRefusal, AFailureOnTheWayIsEveryRanks) {
  const Setting setting{.world = 2, .stage = 3};
  const ModelSpec model = ScriptedModel();
  for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort}) {
    bool failed = true;
    int64_t call = 0;
    for (; failed; ++call) {
      SCOPED_TRACE(::testing::Message() << "call " << call << ", fault " << int{fault});
      ASSERT_LT(call, 50);
      std::vector<absl::Status> statuses(2);
      std::barrier trained(2);
      const absl::Status run = RunThreads(2, [&](World world) -> absl::Status {
        auto calls = std::make_shared<WatchedCalls>();
        calls->fault = fault;
        EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(Watch(world, calls), Device::Cpu(1),
                                                           model, ConfigFor(setting)));
        ScriptedTrainer trainer(model, world.rank());
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
        trained.arrive_and_wait();
        if (world.rank() == 1) calls->fail_at = calls->calls + call;
        statuses[static_cast<size_t>(world.rank())] = engine.Suspend();
        calls->fail_at = -1;
        return absl::OkStatus();
      });
      ASSERT_TRUE(run.ok()) << run;
      EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << statuses[0] << "\n" << statuses[1];
      failed = !statuses[1].ok();
      if (!failed) continue;
      for (const absl::Status& status : statuses)
        EXPECT_THAT(std::string(status.message()), HasSubstr(kInjected));
    }
    EXPECT_GT(call, 3);  // a barrier on each communicator, and the records
  }
}

TEST(SuspensionRefusal, AFailedEngineRefusesOnEveryRank) {
  const Setting setting{.world = 2, .stage = 3};
  EngineOptions options;
  options.optimizer = OptimizerSpec{
      .states = {}, .update = [](const UpdateSlice&) { return absl::DataLossError("broken"); }};
  const ModelSpec model = ScriptedModel();
  RunOn(
      setting, model, ConfigFor(setting),
      [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        // Updates run late, so this step may not know yet.
        TrainStep(engine, trainer, 0).IgnoreError();
        for (const absl::Status& status : {engine.Suspend(), engine.Resume()}) {
          EXPECT_FALSE(status.ok());
          EXPECT_THAT(std::string(status.message()), HasSubstr("broken"));
        }
        return absl::OkStatus();
      },
      options);
}

TEST(SuspensionRefusal, AnEngineThatWasMovedFromRefuses) {
  const Setting setting{.world = 1};
  RunOn(setting, ScriptedModel(), ConfigFor(setting), [](Engine& engine, ScriptedTrainer&) {
    Engine taken = std::move(engine);
    EXPECT_FALSE(engine.Suspend().ok());
    EXPECT_FALSE(engine.Resume().ok());
    EXPECT_FALSE(engine.CopyParametersFrom(taken).ok());
    EXPECT_FALSE(taken.CopyParametersFrom(engine).ok());
    return taken.Suspend();
  });
}

}  // namespace
}  // namespace ebb::testing::suspension_refusal_test
