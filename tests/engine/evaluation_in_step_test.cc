// Evaluations while a step is open: they show its parameters, and it goes on with the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::evaluation_in_step_test {
namespace {

using ::testing::HasSubstr;

// A walk: every parameter equals the one that the step shows, and the sum is that of all ranks.
absl::Status Evaluate(Engine& engine, const ScriptedTrainer& trainer, int world, int walks = 1) {
  Evaluation evaluation = engine.BeginEvaluation(1);
  const float one = 1;
  for (int walk = 0; walk < walks; ++walk) {
    for (int unit : kScriptedUnits) trainer.Look(evaluation.Forward(UnitId{unit}), unit);
    evaluation.AddLoss({.data = &one});
  }
  EBB_ASSIGN_OR_RETURN(const Evaluation::Sums sums, evaluation.FinishSums());
  EXPECT_EQ(sums[0].sum, world * walks);
  return absl::OkStatus();
}

// Between two scopes of a step, or before its first or behind its last; counted in a step.
using Point = std::function<absl::Status(Engine&, const ScriptedTrainer&, int point)>;

absl::StatusOr<ParameterValues> TrainWith(const Setting& setting, const Config& config,
                                          const std::vector<ParameterValues>& shown,
                                          const Point& between) {
  const ModelSpec model = ScriptedModel();
  std::optional<ParameterValues> masters;
  const absl::Status status = RunEngines(
      setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (size_t number = 0; number < shown.size(); ++number) {
          trainer.BeginStep(static_cast<int64_t>(number), &shown[number]);
          Step step = engine.BeginStep(kExactStep);
          int point = 0;
          EBB_RETURN_IF_ERROR(between(engine, trainer, point++));
          for (int round = 0; round < step.rounds(); ++round) {
            for (int unit : kScriptedUnits) {
              trainer.Forward(step, unit);
              EBB_RETURN_IF_ERROR(between(engine, trainer, point++));
            }
            for (int visit = kScriptedVisits; visit-- > 0;) {
              trainer.Backward(step, visit);
              EBB_RETURN_IF_ERROR(between(engine, trainer, point++));
            }
          }
          EBB_RETURN_IF_ERROR(step.Finish());
        }
        EBB_ASSIGN_OR_RETURN(ParameterValues end, GatherAll(engine, model, StateClass::kMaster));
        if (trainer.rank() == 0) masters = std::move(end);
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  return *std::move(masters);
}

constexpr int kScopes = 2 * kScriptedVisits;  // of a round

class EvaluationInStepTest : public ::testing::TestWithParam<Setting> {
 protected:
  // All configs of the cell in turn, each with what steps without an evaluation show and end with.
  using Check = std::function<void(const Setting&, const Config&, const ScriptRun& right)>;
  void ForConfigs(int rounds, std::span<const Timing> timings, const Check& check) {
    Scratch scratch;
    for (const Setting& setting : At(GetParam(), timings)) {
      for (const int64_t depth : {0, 1, 3}) {
        for (const bool on_nvme : {false, true}) {
          if (on_nvme && (setting.stage == 0 || depth == 0)) continue;
          // Each timing and each depth on both.
          const bool turn = (static_cast<int64_t>(setting.timing) + depth / 3) % 2 == 1;
          if (!Full() && setting.stage > 0 && depth > 0 && on_nvme != turn) continue;
          Config config = ConfigFor(setting);
          if (on_nvme) {
            config = OnNvme(config, scratch.path());
            config.zero.offload_param.buffer_count = static_cast<int>(depth);
            config.zero.sub_group_size = 40;
          }
          config.gradient_accumulation_steps = rounds;
          config.ebb.prefetch_depth = depth;
          config.ebb.reshard_after_forward = depth != 3;
          if (depth == 3) config.ebb.coalesce_bytes = 1200;
          config.ebb.reduce_at = depth == 1 ? ReduceAt::kStep : ReduceAt::kRound;
          SCOPED_TRACE(::testing::Message()
                       << setting << ", prefetch " << depth << (on_nvme ? ", on NVMe" : ""));
          const ScriptRun right = RunScript(setting, ScriptedModel(), config,
                                            [](const ScriptedTrainer& trainer, Step& step) {
                                              for (int round = 0; round < step.rounds(); ++round)
                                                trainer.Round(step);
                                            },
                                            {.step = kExactStep});
          ASSERT_OK(right.status);
          check(setting, config, right);
        }
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, EvaluationInStepTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 1, .stage = 1})), NameOf);

TEST_P(EvaluationInStepTest, BetweenRoundsChangesNoBit) {
  ForConfigs(
      /*rounds=*/3, kTimings,
      [](const Setting& setting, const Config& config, const ScriptRun& right) {
        ASSERT_OK_AND_ASSIGN(
            const auto masters,
            TrainWith(setting, config, right.shown,
                      [&](Engine& engine, const ScriptedTrainer& trainer, int point) {
                        const bool between_rounds = point % kScopes == 0 && point < 3 * kScopes;
                        return between_rounds
                                   ? Evaluate(engine, trainer, setting.world, 1 + point / kScopes)
                                   : absl::OkStatus();
                      }));
        EXPECT_EQ(masters, right.masters);
      });
}

// Late updates leave the parameters unchanged until Finish, early ones until the last backward.
TEST_P(EvaluationInStepTest, BetweenAnyScopesChangesNoBit) {
  ForConfigs(/*rounds=*/2, kTimings,
             [](const Setting& setting, const Config& config, const ScriptRun& right) {
               for (const int every : {1, 5}) {
                 ASSERT_OK_AND_ASSIGN(
                     const auto masters,
                     TrainWith(setting, config, right.shown,
                               [&](Engine& engine, const ScriptedTrainer& trainer, int point) {
                                 const bool early = setting.timing == Timing::kEarly;
                                 const bool may =
                                     point <= kScopes + (early ? kScriptedVisits : kScopes);
                                 return may && point % every == 0
                                            ? Evaluate(engine, trainer, setting.world)
                                            : absl::OkStatus();
                               }));
                 EXPECT_EQ(masters, right.masters);
               }
             });
}

// Gathers of the evaluation, also those still running, are not taken for the step's.
TEST_P(EvaluationInStepTest, DroppedInTheMiddleOfAWalkChangesNoBit) {
  ForConfigs(/*rounds=*/2, kNotEarly,
             [](const Setting& setting, const Config& config, const ScriptRun& right) {
               const auto masters =
                   TrainWith(setting, config, right.shown,
                             [&](Engine& engine, const ScriptedTrainer& trainer, int point) {
                               Evaluation evaluation = engine.BeginEvaluation(1);
                               for (int visit = 0; visit < point % kScriptedVisits; ++visit)
                                 trainer.Look(evaluation.Forward(UnitId{kScriptedUnits[visit]}),
                                              kScriptedUnits[visit]);
                               return absl::OkStatus();
                             });
               ASSERT_OK(masters);
               EXPECT_EQ(*masters, right.masters);
             });
}

TEST_P(EvaluationInStepTest, AfterAnEarlyUpdateIsAnError) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  RunOn(setting, ScriptedModel(), ConfigFor(setting),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          trainer.BeginStep(0, nullptr);
          Step step = engine.BeginStep(kExactStep);
          trainer.Round(step);
          EXPECT_FALSE(engine.BeginEvaluation(1).Finish().ok());
          EXPECT_THAT(step.Finish(), Says("BeginEvaluation in a Step after the update of unit",
                                          "ebb.asynchronous_step"));
        });
}

// The error of the step names the call, and the engine goes on.
TEST_P(EvaluationInStepTest, CallsOfTheStepWhileItIsAliveAreErrors) {
  const std::pair<const char*, std::function<void(Engine&, Step&)>> kWrong[] = {
      {"Forward of a Step while an Evaluation in it is alive",
       [](Engine& engine, Step& step) {
         const Evaluation evaluation = engine.BeginEvaluation(1);
         EXPECT_EQ(step.Forward(UnitId{0}).parameter(ParameterId{0}).size(), 0);
       }},
      {"AddLoss of a Step while an Evaluation in it is alive",
       [](Engine& engine, Step& step) {
         const Evaluation evaluation = engine.BeginEvaluation(1);
         const float one = 1;
         step.AddLoss({.data = &one});
       }},
      {"BeginEvaluation while another Evaluation",
       [](Engine& engine, Step& step) {
         Evaluation evaluation = engine.BeginEvaluation(1), second = engine.BeginEvaluation(1);
         const absl::StatusOr<double> finished = evaluation.Finish();
         EXPECT_THAT(finished.status(), Says("while another"));
         step.Forward(UnitId{99});  // so that the step fails too
       }},
      {"BeginEvaluation while Forward('u0') of a Step of the same engine is open",
       [](Engine& engine, Step& step) {
         const ForwardScope open = step.Forward(UnitId{0});
         EXPECT_FALSE(engine.BeginEvaluation(1).Finish().ok());
       }}};
  RunOn(GetParam(), ScriptedModel(), ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          for (const auto& [says, call] : kWrong) {
            SCOPED_TRACE(says);
            trainer.BeginStep(0, nullptr);
            {
              Step step = engine.BeginStep(kExactStep);
              call(engine, step);
              for (int visit = kScriptedVisits; visit-- > 0;) trainer.Backward(step, visit);
              const std::string message(step.Finish().message());
              EXPECT_THAT(message, ::testing::AnyOf(HasSubstr(says), HasSubstr("unit 99")));
            }
            ASSERT_OK(TrainStep(engine, trainer, 0));
          }
        });
}

TEST_P(EvaluationInStepTest, AFinishOfTheStepWhileItIsAliveDropsBoth) {
  RunOn(GetParam(), ScriptedModel(), ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          trainer.BeginStep(0, nullptr);
          Step step = engine.BeginStep(kExactStep);
          trainer.Round(step);
          Evaluation evaluation = engine.BeginEvaluation(1);
          EXPECT_THAT(step.Finish(), Says("Finish of a Step while an Evaluation in it is alive"));
          EXPECT_FALSE(evaluation.Finish().ok());
          ASSERT_OK(TrainStep(engine, trainer, 0));
        });
}

// A Step that goes before its Evaluation takes that with it.
TEST_P(EvaluationInStepTest, AStepThatIsDroppedDropsIt) {
  RunOn(GetParam(), ScriptedModel(), ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, ScriptedModel()));
          trainer.BeginStep(0, nullptr);
          std::optional<Step> step = engine.BeginStep(kExactStep);
          trainer.Forward(*step, 0);
          Evaluation evaluation = engine.BeginEvaluation(1);
          trainer.Look(evaluation.Forward(UnitId{0}), 0);
          step.reset();
          EXPECT_FALSE(evaluation.Finish().ok());
          ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, ScriptedModel()));
          EXPECT_EQ(before, after);
          ASSERT_OK(TrainStep(engine, trainer, 0));
        });
}

// Boundaries of a round are free when the next one begins. Then those of a walk may overwrite them.
TEST_P(EvaluationInStepTest, BetweenRoundsLeavesTheEnginesBoundariesAlone) {
  if (GetParam().stage == 0) GTEST_SKIP() << "nothing is offloaded at stage 0";
  Scratch scratch;
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    SCOPED_TRACE(Name(tier));
    Config config = OnNvme(ConfigFor(GetParam()), scratch.path());
    config.ebb.offload_activations = tier;
    config.gradient_accumulation_steps = 3;
    std::vector<uint32_t> masters[2];
    for (const bool evaluates : {false, true}) {
      OnThreads(GetParam().world, [&](World world) {
        ToyModel model({.boundaries = true});
        ASSERT_OK_AND_ASSIGN(Engine engine,
                             Engine::Create(world, Device::Cpu(1), model.spec(), config));
        for (int64_t number = 0; number < 3; ++number) {
          ASSERT_OK_AND_ASSIGN(const double loss, model.Evaluate(engine, world.rank()));
          Step step = engine.BeginStep();
          for (int round = 0; round < step.rounds(); ++round) {
            for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, world.rank(), number);
            for (int v = model.visits(); v-- > 0;) model.Backward(step, v, world.rank(), number);
            if (!evaluates || round + 1 == step.rounds()) continue;
            ASSERT_OK_AND_ASSIGN(const double again, model.Evaluate(engine, world.rank()));
            EXPECT_EQ(again, loss);
          }
          ASSERT_OK(step.Finish());
        }
        ASSERT_OK_AND_ASSIGN(std::vector<uint32_t> bits, MasterBits(engine, model.spec()));
        if (world.rank() == 0) masters[evaluates] = std::move(bits);
        // Within a round they are there.
        if (!evaluates) return;
        Step step = engine.BeginStep();
        model.Forward(step, 0, world.rank(), 3);
        EXPECT_FALSE(engine.BeginEvaluation(1).Finish().ok());
        EXPECT_THAT(step.Finish(), Says("Evaluate between rounds"));
      });
    }
    EXPECT_FALSE(masters[0].empty());
    EXPECT_EQ(masters[0], masters[1]);
  }
}

}  // namespace
}  // namespace ebb::testing::evaluation_in_step_test
