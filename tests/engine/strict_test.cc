// ebb.strict: a step that leaves out a backward of a trainable visit, or a round, is the same error
// on every rank, unless it may.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/sharding/scopes.h"
#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing::strict_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct LeftOut {
  const char* name;
  int rounds;
  std::vector<std::vector<int>> backward;  // visits of each round that is run
  const char* says;                        // "": it is legal
  bool before_updates = false;             // found before the first early one
};

const LeftOut kLeftOut[] = {
    {"Nothing", 1, {{5, 4, 3, 2, 1, 0}}, ""},
    {"TheBackwardOfWhatIsFrozen", 1, {{5, 4, 3, 1, 0}}, ""},
    {"ABackward", 1, {{5, 3, 2, 1, 0}}, "Backward('u4') was left out of the step", true},
    {"TheFirstBackward",
     1,
     {{4, 3, 2, 1, 0}},
     "Backward('u0') was left out of the step once of the 2 times",
     true},
    {"ABackwardBehindOthers", 1, {{5, 4, 3, 2, 0}}, "Backward('u1') was left out of the step"},
    {"TheLastBackward",
     1,
     {{5, 4, 3, 2, 1}},
     "Backward('u0') was left out of the step once of the 2 times"},
    {"ABackwardOfTheFirstRound",
     3,
     {{5, 4, 2, 1, 0}, {5, 4, 3, 2, 1, 0}, {5, 4, 3, 2, 1, 0}},
     "Backward('u3') was left out of round 1 of 3",
     true},
    {"ABackwardOfTheLastRound",
     3,
     {{5, 4, 3, 2, 1, 0}, {5, 4, 3, 2, 1, 0}, {5, 4, 3, 2, 0}},
     "Backward('u1') was left out of round 3 of 3"},
    {"AllBackwardsOfARound",
     3,
     {{5, 4, 3, 2, 1, 0}, {5, 4, 3, 2, 1, 0}, {}},
     "Backward('u0') was left out of round 3 of 3",
     true},
    {"AllBackwardsOfTheFirstRound",
     3,
     {{}, {5, 4, 3, 2, 1, 0}, {5, 4, 3, 2, 1, 0}},
     "the step ended after 2 of its 3 rounds",
     true},
    {"TheSameBackwardOfEachRound",
     3,
     {{5, 4, 2, 1, 0}, {5, 4, 2, 1, 0}, {5, 4, 2, 1, 0}},
     "Backward('u3') was left out of round 1 of 3",
     true},
    {"TheLastRound",
     3,
     {{5, 4, 3, 2, 1, 0}, {5, 4, 3, 2, 1, 0}},
     "the step ended after 2 of its 3 rounds",
     true},
    {"TheLastRounds", 3, {{5, 4, 3, 2, 1, 0}}, "the step ended after 1 of its 3 rounds", true},
};

const LeftOut& kABackward = kLeftOut[2];

void RunLeaving(const LeftOut& left_out, const ScriptedTrainer& trainer, Step& step) {
  for (const std::vector<int>& visits : left_out.backward) {
    trainer.ForwardAll(step);
    for (int visit : visits) trainer.Backward(step, visit);
  }
}

class StrictTest : public ::testing::TestWithParam<Setting> {
 protected:
  static Config ConfigOf(const Setting& setting, int rounds, bool strict = true) {
    Config config = ConfigFor(setting);
    config.gradient_accumulation_steps = rounds;
    config.ebb.strict = strict;
    return config;
  }
  const ModelSpec model_ = ScriptedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, StrictTest,
                         ::testing::Values(Setting{.world = 1, .stage = 3},
                                           Setting{.world = 2, .stage = 0},
                                           Setting{.world = 2, .stage = 2},
                                           Setting{.world = 3, .stage = 3}),
                         NameOf);

TEST_P(StrictTest, ALeftOutScopeIsAnErrorThatChangesNothing) {
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    for (const LeftOut& left_out : kLeftOut) {
      for (const ReduceAt at : {ReduceAt::kRound, ReduceAt::kStep}) {
        SCOPED_TRACE(::testing::Message() << left_out.name << ", " << setting);
        if (left_out.rounds == 1 && at == ReduceAt::kStep) continue;
        Config config = ConfigOf(setting, left_out.rounds);
        config.ebb.reduce_at = at;
        RunOn(setting, model_, config,
              [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
                Step step = engine.BeginStep(kExactStep);
                RunLeaving(left_out, trainer, step);
                const absl::Status finished = FinishAndReport(engine, step);
                if (*left_out.says == '\0') return finished;
                // The error is the rank's own, not another's.
                EXPECT_EQ(finished.code(), absl::StatusCode::kFailedPrecondition);
                EXPECT_THAT(std::string(finished.message()), ::testing::StartsWith(left_out.says));
                EXPECT_EQ(engine.Report().status(), finished);
                EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(engine, model_));
                EXPECT_EQ(before, after);
                return TrainStep(engine, trainer, 1);
              });
      }
    }
  }
}

TEST_P(StrictTest, AStepMayLeaveOutAndAConfigMayAllowItToAll) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const LeftOut& left_out : kLeftOut) {
      SCOPED_TRACE(::testing::Message() << left_out.name << ", " << setting);
      std::vector<ParameterValues> masters;
      for (const bool strict : {true, false}) {
        const ScriptRun run =
            RunScript(setting, model_, ConfigOf(setting, left_out.rounds, strict),
                      [&](const ScriptedTrainer& trainer, Step& step) {
                        RunLeaving(left_out, trainer, step);
                      },
                      {.steps = 2, .step = {.gradient_divisor = 4, .may_leave_out = strict}});
        EXPECT_OK(run.status);
        masters.push_back(run.masters);
      }
      EXPECT_EQ(masters[0], masters[1]);
    }
  }
}

// Where updates were made before it is known, the engine has failed; else the step is dropped.
TEST_P(StrictTest, WithEarlyUpdatesTheEngineFailsUnlessItWasFoundBeforeTheFirst) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  for (const LeftOut& left_out : kLeftOut) {
    if (*left_out.says == '\0') continue;
    SCOPED_TRACE(left_out.name);
    RunOn(setting, model_, ConfigOf(setting, left_out.rounds),
          [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            Step step = engine.BeginStep(kExactStep);
            RunLeaving(left_out, trainer, step);
            const std::string message(FinishAndReport(engine, step).message());
            EXPECT_THAT(message, HasSubstr(left_out.says));
            const auto failed = HasSubstr("the engine has failed");
            if (left_out.before_updates) {
              EXPECT_THAT(message, Not(failed));
              return TrainStep(engine, trainer, 1);
            }
            EXPECT_THAT(message, failed);
            EXPECT_FALSE(TrainStep(engine, trainer, 1).ok());
            return absl::OkStatus();
          });
  }
}

TEST_P(StrictTest, AHeldStepLearnsOfItFromReduceAndMayBeDropped) {
  RunOn(GetParam(), model_, ConfigOf(GetParam(), 1), [&](Engine& engine, ScriptedTrainer& trainer) {
    StepOptions held = kExactStep;
    held.hold_updates = true;
    for (const bool reduces : {false, true}) {
      Step step = engine.BeginStep(held);
      RunLeaving(kABackward, trainer, step);
      if (!reduces) continue;  // a dropped step may leave out any scope
      EXPECT_THAT(step.Reduce(), Says(kABackward.says));
      EXPECT_THAT(FinishAndReport(engine, step), Says(kABackward.says));
    }
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

// Scopes that ask for no gradient, forwards left out or repeated, and backwards of frozen units
// left out, repeated or out of order.
TEST_P(StrictTest, EveryOtherOffPlanScopeIsLegal) {
  const Script off_plan[] = {
      [](const ScriptedTrainer& trainer, Step& step) {
        trainer.Round(step, {0, 1, 2, 3, 4, 5});
      },
      [](const ScriptedTrainer& trainer, Step& step) {
        for (int unit : {0, 1, 3, 1}) trainer.Forward(step, unit);
        trainer.BackwardAll(step);
      },
      [](const ScriptedTrainer& trainer, Step& step) {
        trainer.ForwardAll(step);
        for (int visit : {5, 4, 3, 1, 2, 2, 0}) trainer.Backward(step, visit);
      },
  };
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const Script& script : off_plan) {
      const ScriptRun run = RunScript(setting, model_, ConfigOf(setting, 1), script,
                                      {.steps = 2, .step = kExactStep});
      EXPECT_TRUE(run.status.ok()) << setting << ": " << run.status;
    }
  }
}

TEST_P(StrictTest, TheFirstErrorIsReported) {
  const std::pair<const char*, Script> kWrong[] = {
      {"unit 17 is not of this engine's model",
       [](const ScriptedTrainer&, Step& step) { step.Backward(UnitId{17}); }},
      {"'base1', which is frozen",
       [](const ScriptedTrainer& trainer, Step& step) {
         for (int visit : {5, 4, 3, 2}) trainer.Backward(step, visit);
         step.Backward(UnitId{1}).gradient(ParameterId{3});
       }},
      {"Finish without any Backward", [](const ScriptedTrainer&, Step&) {}}};
  RunOn(GetParam(), model_, ConfigOf(GetParam(), 2), [&](Engine& engine, ScriptedTrainer& trainer) {
    for (const auto& [says, wrong] : kWrong) {
      Step step = engine.BeginStep(kExactStep);
      trainer.ForwardAll(step);
      wrong(trainer, step);
      EXPECT_THAT(FinishAndReport(engine, step), Says(says));
    }
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

// The error is one rank's own, and the others hear which rank's.
TEST(StrictOnOneRank, IsNamedOnAll) {
  const ModelSpec model = ScriptedModel();
  const Setting setting = {.world = 2, .stage = 2};
  RunOn(setting, model, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
    Step step = engine.BeginStep(kExactStep);
    RunLeaving(trainer.rank() == 1 ? kABackward : kLeftOut[0], trainer, step);
    const std::string message(FinishAndReport(engine, step).message());
    EXPECT_THAT(message, HasSubstr(kABackward.says));
    EXPECT_THAT(message, HasSubstr(trainer.rank() == 0 ? "rank 1" : ""));
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

// The engine's own boundaries need every visit, in any order.
TEST(StrictWithBoundaries, TheErrorIsThatOfTheBoundaries) {
  const ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  const Setting setting = {.world = 2, .stage = 2};
  RunOn(setting, model, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
    for (const bool may : {false, true}) {
      StepOptions options = kExactStep;
      options.may_leave_out = may;
      for (const LeftOut& left_out : {kABackward, kLeftOut[5]}) {
        Step step = engine.BeginStep(options);
        RunLeaving(left_out, trainer, step);
        EXPECT_THAT(std::string(FinishAndReport(engine, step).message()),
                    AllOf(HasSubstr("Visit::output_bytes"), Not(HasSubstr("may_leave_out"))));
      }
    }
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

// forward: u0 u1 u2 u3 u4 u0; u2 is frozen.
class MissingBackwardsTest : public ::testing::Test {
 protected:
  sharding::Plan PlanOf(int rounds, const ModelSpec& model) {
    Config config = ConfigFor({.world = 2, .stage = 2});
    config.gradient_accumulation_steps = rounds;
    const absl::StatusOr<sharding::Plan> plan =
        sharding::PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
    EXPECT_OK(plan);
    return *plan;
  }
  // A step of `rounds` rounds. Each opens all of its forward, and the backwards of `backwards`.
  std::string After(int rounds, const std::vector<std::vector<int>>& backwards) {
    const sharding::Plan plan = PlanOf(rounds, model_);
    missing_.Begin(plan, plan.step_rounds);
    const int of_round = static_cast<int>(plan.scopes.size()) / plan.decisions.rounds;
    int next = 0;
    for (int s = 0; s < static_cast<int>(backwards.size()) * of_round; ++s) {
      const sharding::PlannedScope& scope = plan.scopes[static_cast<size_t>(s % of_round)];
      const std::vector<int>& visits = backwards[static_cast<size_t>(s / of_round)];
      if (scope.backward && std::find(visits.begin(), visits.end(), scope.visit) == visits.end())
        continue;
      missing_.LeftOut(next, s);
      next = s + 1;
    }
    missing_.LeftOut(next, rounds * of_round);
    return std::string(missing_.Error().message());
  }

  const ModelSpec model_ = ScriptedModel();
  MissingBackwards missing_;
};

TEST_F(MissingBackwardsTest, NothingIsMissingWithoutFrozenUnits) {
  EXPECT_EQ(After(1, {{5, 4, 3, 2, 1, 0}}), "");
  EXPECT_EQ(After(1, {{5, 4, 3, 1, 0}}), "");
  EXPECT_EQ(After(3, {{5, 4, 3, 2, 1, 0}, {5, 4, 3, 1, 0}, {5, 4, 3, 1, 0}}), "");
}

TEST_F(MissingBackwardsTest, TheFirstInTheOrderOfBackwardIsNamed) {
  EXPECT_THAT(
      After(1, {{5, 2, 0}}),
      AllOf(HasSubstr("Backward('u4') was left out of the step, so its gradient would be zero"),
            HasSubstr("in the order of the model (ModelSpec::forward, ModelSpec::order)"),
            HasSubstr("StepOptions::may_leave_out"), HasSubstr("\"strict\": false")));
  EXPECT_THAT(After(1, {{5, 4, 2, 0}}), HasSubstr("Backward('u3') was left out of the step"));
  for (const std::vector<int>& backwards : {std::vector{5, 4, 3, 2, 1}, {4, 3, 2, 1, 0}})
    EXPECT_THAT(After(1, {backwards}),
                HasSubstr("Backward('u0') was left out of the step once of the 2 times that "
                          "the model has it, so its gradient would lack a part"));
}

TEST_F(MissingBackwardsTest, TheRoundIsNamedIfThereAreSeveral) {
  const std::vector<int> whole = {5, 4, 3, 2, 1, 0};
  EXPECT_THAT(After(3, {whole, {5, 4, 3, 2, 0}, {5, 0}}),
              HasSubstr("Backward('u1') was left out of round 2 of 3, so its gradient would lack"));
  EXPECT_THAT(After(2, {whole, {5, 3, 2, 1, 0}}),
              HasSubstr("Backward('u4') was left out of round 2 of 2"));
  EXPECT_THAT(After(2, {whole, {}}), HasSubstr("Backward('u0') was left out of round 2 of 2, so"));
}

TEST_F(MissingBackwardsTest, RoundsThatNeverBeganAreCounted) {
  const std::vector<int> whole = {5, 4, 3, 2, 1, 0};
  EXPECT_THAT(
      After(4, {whole}),
      AllOf(HasSubstr("the step ended after 1 of its 4 rounds"), HasSubstr("Step::rounds()"),
            HasSubstr("StepOptions::micro_batches"), HasSubstr("StepOptions::may_leave_out")));
  EXPECT_THAT(After(4, {whole, whole, whole}), HasSubstr("ended after 3 of its 4 rounds"));
}

// A backward that is left out comes no more, so it is known before the updates that follow.
TEST_F(MissingBackwardsTest, IsKnownAtOnce) {
  const sharding::Plan plan = PlanOf(2, model_);
  missing_.Begin(plan, plan.step_rounds);
  missing_.LeftOut(9, 10);  // of u2, which is frozen
  EXPECT_OK(missing_.Error());
  missing_.LeftOut(10, 11);
  EXPECT_THAT(missing_.Error(), Says("Backward('u1')"));
  missing_.LeftOut(11, 12);
  EXPECT_THAT(missing_.Error(), Says("Backward('u1')"));
  missing_.Begin(plan, plan.step_rounds);
  EXPECT_OK(missing_.Error());
}

// Backward ends at the first trainable visit. Earlier visits of forward have none.
TEST_F(MissingBackwardsTest, UnitsBeforeTheFirstTrainableVisitAreNotMissed) {
  ModelSpec model = ScriptedModel();
  for (ParameterId id : model.units[0].parameters)
    model.parameters[static_cast<size_t>(id)].trainable = false;
  const sharding::Plan plan = PlanOf(1, model);
  missing_.Begin(plan, plan.step_rounds);
  missing_.LeftOut(0, 6);  // every Forward
  EXPECT_OK(missing_.Error());
}

}  // namespace
}  // namespace ebb::testing::strict_test
