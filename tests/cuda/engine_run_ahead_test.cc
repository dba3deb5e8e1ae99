// Steps that are enqueued before the outcome of earlier ones is known: the calls that wait for it, and
// the bits of the CPU.
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <optional>
#include <utility>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "run_ahead.h"
#include "stand_in.h"
#include "tests/engine/scripted.h"

namespace ebb::testing::run_ahead {
namespace {

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
    ASSERT_TRUE(status.ok()) << status;
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
      {[](Engine& engine) { EXPECT_TRUE(engine.Report().ok()); }, true},
      {[](Engine& engine) {
         const auto ignore = [](const Slice&, std::span<const float>) { return absl::OkStatus(); };
         EXPECT_TRUE(engine.Read(StateClass::kMaster, ignore).ok());
       },
       true},
      {[](Engine& engine) { engine.BeginEvaluation(); }, true},
      {[](Engine& engine) {
         EXPECT_TRUE(engine.Suspend().ok());
         EXPECT_TRUE(engine.Resume().ok());
       },
       true},
      {[](Engine& engine) { (void)engine.memory(); }, false},
  };
  for (const auto& [look, waits] : looks) {
    const absl::Status status = Run(LateConfig(), /*on_gpu=*/true,
                                    [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                                      const Hold hold(engine);
                                      EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
                                      EXPECT_FALSE(hold.has_waited());
                                      look(engine);
                                      EXPECT_EQ(hold.has_waited(), waits);
                                      return absl::OkStatus();
                                    });
    EXPECT_TRUE(status.ok()) << status;
  }
  const absl::Status status = Run(LateConfig(), /*on_gpu=*/true,
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
                                  });
  EXPECT_TRUE(status.ok()) << status;
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
    EXPECT_TRUE(status.ok()) << status;
  }
}

// True also if its reads are under way when it is asked for.
TEST_P(EngineRunsAheadTest, TheTrafficOfAStepIsAllOfIt) {
  const absl::Status status = Run(LateConfig(), /*on_gpu=*/true,
                                  [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                                    for (int64_t number = 0; number < 3; ++number) {
                                      const Hold hold(engine);
                                      EBB_RETURN_IF_ERROR(trainer.Train(engine, number));
                                      const std::vector<TrafficRow> rows = engine.traffic();
                                      EXPECT_EQ(rows.empty(), GetParam().tier == Tier::kDevice);
                                      for (const TrafficRow& row : rows) {
                                        EXPECT_EQ(row.bytes, row.predicted_bytes)
                                            << number << " " << Name(row.state) << " "
                                            << Name(row.tier) << " " << Name(row.direction);
                                      }
                                    }
                                    return absl::OkStatus();
                                  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::testing::run_ahead
