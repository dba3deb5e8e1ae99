// Errors of steps that are enqueued before the outcome of earlier ones is known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "run_ahead.h"
#include "tests/engine/scripted.h"

namespace ebb::testing::run_ahead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
            EXPECT_TRUE(finished[2].ok()) << finished[2];
          } else {
            EXPECT_TRUE(finished[0].ok()) << finished[0];
            EXPECT_EQ(finished[2].ok(), first_rank_asks) << finished[2];
          }
          EXPECT_TRUE(finished[1].ok()) << finished[1];
          EXPECT_TRUE(finished[3].ok()) << finished[3];
          EXPECT_TRUE(engine.Report().ok()) << engine.Report().status();
          EXPECT_EQ(engine.Report()->step, first_rank_asks ? 4 : 2);
          return Keep(engine, rank, masters);
        });
    ASSERT_TRUE(status.ok()) << status;
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
  ASSERT_TRUE(status.ok()) << status;
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
  EXPECT_TRUE(status.ok()) << status;
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
    ASSERT_TRUE(status.ok()) << status;
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
  ASSERT_TRUE(status.ok()) << status;
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
  ASSERT_TRUE(status.ok()) << status;
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
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

}  // namespace
}  // namespace ebb::testing::run_ahead
