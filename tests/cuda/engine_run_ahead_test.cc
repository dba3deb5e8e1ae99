// Steps that are enqueued before the outcome of earlier ones is known: the calls that wait for it, and
// the bits of the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "run_ahead.h"
#include "stand_in.h"
#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing::run_ahead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Gpu, EngineRunsAheadTest, RunsAhead(), NameOf);

// Step 0's overflow becomes known only when all of step 1 is in the queue.
TEST_P(EngineRunsAheadTest, OneStepAheadWithTheBitsOfTheCpu) {
  constexpr int kSteps = 7;
  struct Result {
    ParameterValues masters;
    StepReport report;
    float loss_scale = 0;
  };
  const auto train = [&](bool on_gpu, int overflow, Result& result) {
    const absl::Status status =
        Run(LateConfig(), on_gpu, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
          std::optional<Hold> hold;
          const int spinning_waits = stand_in::SpinningWaits();
          for (int number = 0; number < kSteps; ++number) {
            if (number == 0) hold.emplace(engine);
            Step step = engine.BeginStep();
            trainer.Enqueue(step, number, number == overflow && rank == kRanks - 1);
            EBB_RETURN_IF_ERROR(step.Finish());
            // Two steps are in the queue; a third one would have to wait.
            EXPECT_EQ(hold->has_waited(), on_gpu && number >= 2) << number;
          }
          EXPECT_EQ(stand_in::SpinningWaits(), spinning_waits);  // its waits sleep
          EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
          if (rank == 0) result.report = report;
          {
            const Step step = engine.BeginStep();
            if (rank == 0) result.loss_scale = step.loss_scale();
          }
          return Keep(engine, rank, result.masters);
        });
    ASSERT_OK(status);
  };
  for (const int overflow : {0, 1, 5, kSteps}) {
    SCOPED_TRACE(overflow);
    Result cpu, gpu;
    train(/*on_gpu=*/false, overflow, cpu);
    train(/*on_gpu=*/true, overflow, gpu);
    ASSERT_FALSE(cpu.masters.empty());
    EXPECT_EQ(gpu.masters, cpu.masters);
    EXPECT_EQ(gpu.loss_scale, cpu.loss_scale);
    EXPECT_EQ(gpu.report.step, kSteps);
    EXPECT_EQ(gpu.report.skipped_steps, overflow < kSteps ? 1 : 0);
    EXPECT_EQ(gpu.report.skipped_steps, cpu.report.skipped_steps);
    EXPECT_EQ(gpu.report.applied, cpu.report.applied);
    EXPECT_EQ(gpu.report.gradient_norm, cpu.report.gradient_norm);
    EXPECT_EQ(gpu.report.loss_scale, cpu.report.loss_scale);
    EXPECT_EQ(gpu.report.learning_rate, cpu.report.learning_rate);
  }
}

TEST_P(EngineRunsAheadTest, CallsThatNeedTheOutcomeWait) {
  using Look = std::function<void(Engine & engine)>;
  const bool fp16 = GetParam().compute == DType::kFloat16;
  const std::pair<Look, bool> looks[] = {
      {[](Engine& engine) { EXPECT_OK(engine.Report()); }, true},
      {[](Engine& engine) {
         const auto ignore = [](const Slice&, std::span<const float>) { return absl::OkStatus(); };
         EXPECT_OK(engine.Read(StateClass::kMaster, ignore));
       },
       true},
      {[](Engine& engine) { engine.BeginEvaluation(); }, true},
      {[](Engine& engine) {
         EXPECT_OK(engine.Suspend());
         EXPECT_OK(engine.Resume());
       },
       true},
      {[](Engine& engine) { (void)engine.memory(); }, false},
  };
  for (const auto& [look, waits] : looks) {
    ExpectOk(Run(LateConfig(), /*on_gpu=*/true,
                 [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                   const Hold hold(engine);
                   EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
                   EXPECT_FALSE(hold.has_waited());
                   look(engine);
                   EXPECT_EQ(hold.has_waited(), waits);
                   return absl::OkStatus();
                 }));
  }
  ExpectOk(Run(LateConfig(), /*on_gpu=*/true,
               [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                 const Hold hold(engine);
                 EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
                 Step step = engine.BeginStep();
                 EXPECT_NE(step.device_loss_scale().data, nullptr);
                 EXPECT_FALSE(hold.has_waited());
                 EXPECT_GE(step.loss_scale(), 1);
                 EXPECT_EQ(hold.has_waited(), fp16);
                 trainer.Enqueue(step, 1);
                 return step.Finish();
               }));
}

// The next step's work stands still until the report is there.
TEST_P(EngineRunsAheadTest, AReportInTheNextStepDoesNotWaitForThatStepsWork) {
  for (const bool mistaken : {false, true}) {
    const absl::Status status =
        Run(LateConfig(), /*on_gpu=*/true,
            [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
              EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
              std::latch reported(1);
              Step step = engine.BeginStep();
              stand_in::EnqueueKernel(static_cast<cudaStream_t>(engine.compute_stream().native),
                                      Task([latch = &reported] { latch->wait(); }));
              if (mistaken) {
                trainer.EnqueueWithMistake(step, 1);
              } else {
                trainer.Enqueue(step, 1);
              }
              const absl::StatusOr<StepReport> report = engine.Report();
              reported.count_down();
              EBB_RETURN_IF_ERROR(report.status());
              EXPECT_EQ(report->step, 1);
              EXPECT_EQ(step.Finish().ok(), !mistaken || rank == 0);
              const absl::StatusOr<StepReport> last = engine.Report();
              EXPECT_EQ(last.ok(), !mistaken) << last.status();
              if (last.ok()) {
                EXPECT_EQ(last->step, 2);
              }
              return absl::OkStatus();
            });
    EXPECT_OK(status);
  }
}

// True also if its reads are under way when it is asked for.
TEST_P(EngineRunsAheadTest, TheTrafficOfAStepIsAllOfIt) {
  ExpectOk(Run(LateConfig(), /*on_gpu=*/true,
               [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                 for (int64_t number = 0; number < 3; ++number) {
                   const Hold hold(engine);
                   EBB_RETURN_IF_ERROR(trainer.Train(engine, number));
                   const std::vector<TrafficRow> rows = engine.traffic();
                   EXPECT_EQ(rows.empty(), GetParam().tier == Tier::kDevice);
                   for (const TrafficRow& row : rows)
                     EXPECT_EQ(row.bytes, row.predicted_bytes)
                         << number << " " << Name(row.state) << " " << Name(row.tier) << " "
                         << Name(row.direction);
                 }
                 return absl::OkStatus();
               }));
}

// Errors of steps that are enqueued before the outcome of earlier ones is known.

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

using RunAheadErrorsTest = EngineRunsAheadTest;
INSTANTIATE_TEST_SUITE_P(Gpu, RunAheadErrorsTest, RunsAhead(), NameOf);

// Neither in its own step nor in a step that began before the callers on all ranks knew of the
// error.
TEST_P(RunAheadErrorsTest, AnErrorOfOneRankLetsNoUpdateThroughOnAny) {
  const Config config = LateConfig();
  for (const bool first_rank_asks : {false, true}) {
    SCOPED_TRACE(first_rank_asks);
    ParameterValues masters;
    const absl::Status status = Run(
        config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
          EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
          std::vector<absl::Status> finished;
          {
            // If both ranks went on, one would wait for the other's stream.
            std::optional<Hold> hold;
            if (!first_rank_asks) hold.emplace(engine);
            Step step = engine.BeginStep();
            trainer.EnqueueWithMistake(step, 1);
            finished.push_back(step.Finish());
          }
          if (rank == 0 && first_rank_asks) {
            EXPECT_THAT(Text(engine.Report().status()),
                        HasSubstr("rank 1: parameter 'w1' asked of"));
            EXPECT_FALSE(engine.Report().ok());
          }
          for (int64_t number = 2; number < 5; ++number)
            finished.push_back(trainer.Train(engine, number));
          if (rank == 1) {  // the error is its own
            EXPECT_THAT(Text(finished[0]), HasSubstr("parameter 'w1' asked of"));
            EXPECT_OK(finished[2]);
          } else {
            EXPECT_OK(finished[0]);
            EXPECT_EQ(finished[2].ok(), first_rank_asks) << finished[2];
          }
          EXPECT_OK(finished[1]);
          EXPECT_OK(finished[3]);
          EXPECT_OK(engine.Report());
          EXPECT_EQ(engine.Report()->step, first_rank_asks ? 4 : 2);
          return Keep(engine, rank, masters);
        });
    ASSERT_OK(status);
    EXPECT_EQ(masters, MastersAfter(config, first_rank_asks ? std::vector<int64_t>{0, 2, 3, 4}
                                                            : std::vector<int64_t>{0, 4}));
  }
}

TEST_P(RunAheadErrorsTest, CallsThatReadStateReturnAnEarlierError) {
  const Config config = LateConfig();
  ParameterValues masters;
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        const Hold hold(engine);  // else rank 0's Finish may know of the error already
        Step step = engine.BeginStep();
        trainer.EnqueueWithMistake(step, 1);
        EXPECT_EQ(step.Finish().ok(), rank == 0);
        const absl::Status looked = GatherAll(engine, model_, StateClass::kMaster).status();
        EXPECT_THAT(Text(looked), HasSubstr("parameter 'w1' asked of"));
        return Keep(engine, rank, masters);
      });
  ASSERT_OK(status);
  EXPECT_EQ(masters, MastersAfter(config, {0}));
}

TEST_P(RunAheadErrorsTest, EarlyUpdatesOfAStepThatFailsFailTheEngineOfAllRanks) {
  const absl::Status status =
      Run(EarlyConfig(), /*on_gpu=*/true,
          [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
            EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
            const Hold hold(engine);  // else rank 0's Finish may know of the error already
            Step step = engine.BeginStep();
            trainer.EnqueueWithMistake(step, 1);
            EXPECT_EQ(step.Finish().ok(), rank == 0);
            trainer.Train(engine, 2).IgnoreError();
            EXPECT_THAT(Text(engine.Report().status()), HasSubstr("parameter 'w1' asked of"));
            EXPECT_THAT(Text(trainer.Train(engine, 3)), HasSubstr("the engine has failed"));
            EXPECT_FALSE(GatherAll(engine, model_, StateClass::kMaster).ok());
            return absl::OkStatus();
          });
  EXPECT_OK(status);
}

// No rank has to be held back.
TEST_P(RunAheadErrorsTest, AMistakeOfAllRanksEndsWithItsStep) {
  for (const Config& config : {LateConfig(), EarlyConfig()}) {
    ParameterValues masters;
    const absl::Status status = Run(
        config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
          EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
          Step step = engine.BeginStep();
          trainer.Forward(step);
          EXPECT_THAT(Text(step.Finish()), HasSubstr("Finish without any Backward"));
          EBB_RETURN_IF_ERROR(trainer.Train(engine, 2));
          EBB_RETURN_IF_ERROR(engine.Report().status());
          return Keep(engine, rank, masters);
        });
    ASSERT_OK(status);
    EXPECT_EQ(masters, MastersAfter(config, {0, 2}));
  }
}

TEST_P(RunAheadErrorsTest, ANonFiniteGradientWithoutChecksIsAnErrorOfAllRanks) {
  Config config = LateConfig();
  config.ebb.check_overflow = false;
  if (config.compute == DType::kFloat16) return;  // fp16 always checks
  ParameterValues masters;
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        for (int64_t number = 1; number < 3; ++number) {
          Step step = engine.BeginStep();
          trainer.Enqueue(step, number, /*overflows=*/number == 1 && rank == 1);
          EBB_RETURN_IF_ERROR(step.Finish());
        }
        EXPECT_THAT(
            Text(engine.Report().status()),
            AllOf(HasSubstr("non-finite gradient in unit 'u3'"), HasSubstr("ebb.check_overflow")));
        return Keep(engine, rank, masters);
      });
  ASSERT_OK(status);
  EXPECT_EQ(masters, MastersAfter(config, {0}));
}

// Only stage 1 has collectives that do not notice it.
TEST_P(RunAheadErrorsTest, ScopesThatDifferAreNamedToAllRanks) {
  Config config = LateConfig();
  config.zero.stage = 1;
  config.zero.offload_param.device = Tier::kDevice;
  ParameterValues masters;
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        Step step = engine.BeginStep();
        trainer.Forward(step, /*without=*/rank == 1 ? std::vector<int>{2} : std::vector<int>{});
        trainer.Backward(step, 1);
        EBB_RETURN_IF_ERROR(step.Finish());
        // One rank asks at once, the other one after its next step.
        if (rank == 1) EBB_RETURN_IF_ERROR(trainer.Train(engine, 2));
        EXPECT_THAT(Text(engine.Report().status()),
                    AllOf(HasSubstr("as number 3 of the step rank 0 opened Forward('u2')"),
                          HasSubstr("rank 1 Forward('u3')")));
        if (rank == 0) EBB_RETURN_IF_ERROR(trainer.Train(engine, 2));
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 3));
        EBB_RETURN_IF_ERROR(engine.Report().status());
        return Keep(engine, rank, masters);
      });
  ASSERT_OK(status);
  EXPECT_EQ(masters, MastersAfter(config, {0, 3}));
}

// The others learn why the rank left, not only that it did.
TEST_P(RunAheadErrorsTest, ARankThatLeavesAfterItsErrorIsQuoted) {
  Config config = LateConfig();
  config.ebb.timeout_seconds = 5;  // NCCL does not see that a rank has left
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        Step step = engine.BeginStep();
        trainer.EnqueueWithMistake(step, 1);
        absl::Status finished = step.Finish();
        EXPECT_EQ(finished.ok(), rank == 0);
        if (rank == 1) return finished;
        for (int64_t number = 2; number < 5 && finished.ok(); ++number)
          finished = trainer.Train(engine, number);
        EXPECT_THAT(Text(finished), HasSubstr("parameter 'w1' asked of"));
        return absl::OkStatus();
      });
  EXPECT_THAT(Text(status), HasSubstr("parameter 'w1' asked of"));
}

TEST_P(RunAheadErrorsTest, AnEngineEndsWithVerdictsOpen) {
  for (const bool in_error : {false, true}) {
    for (const bool in_step : {false, true}) {
      const absl::Status status =
          Run(LateConfig(), /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int) {
            const Hold hold(engine);
            for (int64_t number = 0; number < 2; ++number) {
              Step step = engine.BeginStep();
              if (in_error) {
                trainer.EnqueueWithMistake(step, number);
              } else {
                trainer.Enqueue(step, number);
              }
              step.Finish().IgnoreError();
            }
            EXPECT_FALSE(hold.has_waited());
            if (in_step) engine.BeginStep();
            return absl::OkStatus();
          });
      EXPECT_OK(status);
    }
  }
}

}  // namespace
}  // namespace ebb::testing::run_ahead
