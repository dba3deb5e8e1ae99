// Scopes off the declared order, left open, overlapping, or asked for tensors that they do not
// have: right numbers and a warning, or an error that says what to do; never wrong numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ebb/runtime/engine/scope.h"
#include "ebb/sharding/order.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/status.h"

namespace ebb::testing::scopes_test {
namespace {

using ::testing::HasSubstr;

const char kWarning[] = "where the declared order has";

struct OffPlanOrder {
  const char* name;
  std::string_view scopes;        // of one round: F and a unit, B and a visit
  std::vector<int> without = {};  // visits without a backward in it
};

const OffPlanOrder kOffPlanOrders[] = {
    {"ForwardLeftOut", "F0 F1 F2 F4 F0 B5 B4 B3 B2 B1 B0"},
    {"FirstForwardLeftOut", "F1 F2 F3 F4 F0 B5 B4 B3 B2 B1 B0"},
    {"UnitLeftOutOfForwardAndBackward", "F0 F1 F2 F4 F0 B5 B4 B2 B1 B0", {3}},
    {"BackwardLeftOut", "F0 F1 F2 F3 F4 F0 B5 B3 B2 B1 B0", {4}},
    {"NeighboursLeftOutOfBackward", "F0 F1 F2 F3 F4 F0 B5 B4 B0", {1, 3}},
    {"LastBackwardLeftOut", "F0 F1 F2 F3 F4 F0 B5 B4 B3 B2 B1", {0}},
    {"ForwardSwapped", "F0 F3 F2 F1 F4 F0 B5 B4 B3 B2 B1 B0"},
    {"FrozenBackwardOutOfOrderAndAgain", "F0 F1 F2 F3 F4 F0 B5 B4 B3 B1 B2 B2 B0"},
    {"ForwardAgainBetweenBackwards", "F0 F1 F2 F3 F4 F0 B5 F3 F2 B4 B3 F1 B2 B1 B0"},
    {"ForwardAgainAtOnce", "F0 F1 F1 F2 F3 F4 F0 B5 B4 B3 B2 B1 B0"},
    {"ForwardAgainLater", "F0 F1 F2 F3 F1 F4 F0 B5 B4 B3 B2 B1 B0"},
    {"RecomputedByForwardScopes", "F0 F1 F2 F3 F4 F0 F0 B5 F4 B4 F3 B3 F2 B2 F1 B1 F0 B0"},
    {"WalkRepeated", "F0 F1 F2 F3 F4 F0 F0 F1 F2 F3 F4 F0 B5 B4 B3 B2 B1 B0"},
};
// Without the last two, which could as well be the next round.
const std::span<const OffPlanOrder> kInAnyRound(kOffPlanOrders, std::size(kOffPlanOrders) - 2);

void Open(std::string_view scopes, const ScriptedTrainer& trainer, Step& step) {
  for (size_t at = 0; at < scopes.size(); at += 3) {
    const int number = scopes[at + 1] - '0';
    if (scopes[at] == 'F') trainer.Forward(step, number);
    if (scopes[at] == 'B') trainer.Backward(step, number);
  }
}

class OffPlanScopesTest : public ::testing::TestWithParam<Setting> {
 protected:
  // Runs `rounds` rounds a step, in the declared order and with each of `orders` in the rounds
  // `off_plan_rounds`. Compares every view and the masters.
  static void Compare(const Setting& setting, Config config,
                      std::span<const OffPlanOrder> orders = kOffPlanOrders, int rounds = 1,
                      std::vector<int> off_plan_rounds = {0}) {
    config.gradient_accumulation_steps = rounds;
    const ModelSpec model = ScriptedModel();
    const auto is_off_plan = [&](int round) {
      return std::find(off_plan_rounds.begin(), off_plan_rounds.end(), round) !=
             off_plan_rounds.end();
    };
    std::map<std::vector<int>, ScriptRun> all_declared;  // by what is left out
    for (const OffPlanOrder& order : orders) {
      SCOPED_TRACE(::testing::Message() << order.name << ", " << setting << ", " << rounds
                                        << " rounds, prefetch " << config.ebb.prefetch_depth);
      const auto [known, is_new] = all_declared.try_emplace(order.without);
      ScriptRun& declared = known->second;
      if (is_new) {
        declared =
            RunScript(setting, model, config, [&](const ScriptedTrainer& trainer, Step& step) {
              for (int r = 0; r < step.rounds(); ++r)
                trainer.Round(step, is_off_plan(r) ? order.without : std::vector<int>());
            });
      }
      ASSERT_OK(declared.status);
      EXPECT_EQ(Occurrences(declared.log, kWarning), 0) << declared.log;
      StepOptions options = kExactStep;
      options.may_leave_out = !order.without.empty();
      const ScriptRun off_plan = RunScript(setting, model, config,
                                           [&](const ScriptedTrainer& trainer, Step& step) {
                                             for (int r = 0; r < step.rounds(); ++r) {
                                               if (is_off_plan(r)) {
                                                 Open(order.scopes, trainer, step);
                                               } else {
                                                 trainer.Round(step);
                                               }
                                             }
                                           },
                                           {.step = options, .shown = &declared.shown});
      ASSERT_OK(off_plan.status);
      EXPECT_EQ(off_plan.masters, declared.masters);
      EXPECT_EQ(Occurrences(off_plan.log, kWarning), options.may_leave_out ? 0 : 1) << off_plan.log;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, OffPlanScopesTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 2})), NameOf);

// No warning in a step that may leave out scopes.
TEST_P(OffPlanScopesTest, GivesTheNumbersOfTheDeclaredOrderAndOneWarning) {
  for (const Setting& setting : At(GetParam(), kTimings)) Compare(setting, ConfigFor(setting));
}

TEST_P(OffPlanScopesTest, GivesThemAtAnyPrefetchDepthAndInBuckets) {
  Setting setting = GetParam();
  for (const int64_t depth : {0, 2}) {
    setting.timing = depth == 0 ? Timing::kLate : Timing::kEarly;
    Config config = ConfigFor(setting);
    config.ebb.prefetch_depth = depth;
    if (depth == 2) config.ebb.coalesce_bytes = 1200;  // two units or so
    Compare(setting, config);
  }
}

// A scope that is left out also drops its transfers from and to the disk.
TEST_P(OffPlanScopesTest, GivesThemWithEverythingOnNvme) {
  if (GetParam().stage == 0) GTEST_SKIP() << "nothing is offloaded at stage 0";
  if (GetParam().world > 2) GTEST_SKIP() << "a disk for three ranks takes its time";
  Scratch scratch;
  for (const Setting& setting : At(GetParam(), kTimings)) {
    Config config = OnNvme(ConfigFor(setting), scratch.path());
    if (setting.timing != Timing::kOff) config.ebb.prefetch_depth = 2;
    if (setting.timing == Timing::kLate) {
      config.ebb.coalesce_bytes = 1200;
      config.ebb.offload_gradients = Tier::kNvme;
      config.ebb.verify_swap = VerifySwap::kAll;
    }
    Compare(setting, config);
    const Script round = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
    EXPECT_EQ(RunScript(setting, ScriptedModel(), config, round).masters,
              RunScript(setting, ScriptedModel(), ConfigFor(setting), round).masters);
  }
}

TEST_P(OffPlanScopesTest, GivesThemInAnyRound) {
  Setting setting = GetParam();
  for (const ReduceAt at : {ReduceAt::kRound, ReduceAt::kStep}) {
    for (const int round : {0, 1, 2}) {
      setting.timing = round == 1 ? Timing::kEarly : Timing::kLate;
      Config config = ConfigFor(setting);
      config.ebb.reduce_at = at;
      Compare(setting, config, kInAnyRound, /*rounds=*/3, {round});
    }
  }
}

TEST_P(OffPlanScopesTest, GivesThemInAllRounds) {
  Compare(GetParam(), ConfigFor(GetParam()), kInAnyRound, /*rounds=*/3, {0, 1, 2});
}

// A gradient has one place in the order. A scope out of its place, or a second one, is an error
// that names the scope and the place where the order is declared. The step is dropped, and the
// engine goes on.
TEST_P(OffPlanScopesTest, ABackwardOutOfOrderOrAgainIsAnErrorThatChangesNothing) {
  struct Refused {
    std::vector<int> backward;  // visits
    const char* says;
    const char* why;
  };
  const Refused kRefused[] = {
      {{5, 4, 1, 2, 3, 0}, "Backward('u3')", "was left out when a later scope was opened"},
      {{4, 3, 2, 1, 0, 5}, "Backward('u0')", "was left out when a later scope was opened"},
      {{5, 4, 4, 3, 2, 1, 0}, "Backward('u4')", "came once more than declared"},
      {{5, 4, 3, 2, 1, 0, 1}, "Backward('u1')", "came once more than declared"},
      {{5, 4, 3, 2, 1, 0, 0}, "Backward('u0')", "came once more than declared"},
  };
  const ModelSpec model = ScriptedModel();
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    const Config config = ConfigFor(setting);
    const ScriptRun right =
        RunScript(setting, model, config,
                  [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); });
    ASSERT_OK(right.status);
    for (const Refused& refused : kRefused) {
      SCOPED_TRACE(::testing::Message() << refused.says << " " << refused.why << ", " << setting);
      RunOn(setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (int number = 0; number < 3; ++number) {
          trainer.BeginStep(number, nullptr);
          if (number == 1) {
            Step step = engine.BeginStep({.gradient_divisor = 4, .may_leave_out = true});
            trainer.ForwardAll(step);
            BackwardOf(trainer, step, refused.backward);
            const absl::Status wrong = FinishAndReport(engine, step);
            EXPECT_THAT(wrong, StatusIs(absl::StatusCode::kFailedPrecondition, refused.says,
                                        refused.why, sharding::kOrderDeclaredIn));
            EXPECT_EQ(engine.Report().status(), wrong);
          }
          trainer.BeginStep(number, &right.shown[static_cast<size_t>(number)]);
          Step step = engine.BeginStep({.gradient_divisor = 4});
          trainer.Round(step);
          if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
        }
        EXPECT_EQ(*GatherAll(engine, model, StateClass::kMaster), right.masters);
        return absl::OkStatus();
      });
    }
  }
}

// The other ranks hear of it, and wait for no collective that the rank at fault left out.
TEST_P(OffPlanScopesTest, ABackwardRefusedOnOneRankIsNamedOnAll) {
  if (GetParam().world == 1) GTEST_SKIP() << "it has no others";
  const ModelSpec model = ScriptedModel();
  const absl::Status status =
      RunEngines(GetParam(), model, ConfigFor(GetParam()),
                 [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                   trainer.BeginStep(0, nullptr);
                   {
                     Step step = engine.BeginStep({.may_leave_out = true});
                     trainer.ForwardAll(step);
                     BackwardOf(trainer, step,
                                trainer.rank() == 1 ? std::vector<int>{5, 4, 2, 3, 1, 0}
                                                    : std::vector<int>{5, 4, 3, 2, 1, 0});
                     const std::string message(FinishAndReport(engine, step).message());
                     EXPECT_THAT(message, HasSubstr("Backward('u3') was left out when"));
                     EXPECT_THAT(message, HasSubstr(trainer.rank() == 1 ? "" : "rank 1"));
                   }
                   Step step = engine.BeginStep();
                   trainer.Round(step);
                   return FinishAndReport(engine, step);
                 });
  EXPECT_OK(status);
}

// Where parts of the step were updated before it, nothing can be right any more.
TEST_P(OffPlanScopesTest, ABackwardAgainAfterAnEarlyUpdateFailsTheEngine) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  const ScriptRun run = RunScript(setting, ScriptedModel(), ConfigFor(setting),
                                  [](const ScriptedTrainer& trainer, Step& step) {
                                    trainer.ForwardAll(step);
                                    BackwardOf(trainer, step, {5, 4, 4, 3, 2, 1, 0});
                                  });
  EXPECT_THAT(run.status,
              Says("the engine has failed", "Backward('u4')", sharding::kOrderDeclaredIn));
}

// Such a Forward would show parameters of the next step.
TEST_P(OffPlanScopesTest, AForwardAgainAfterAnEarlyUpdateFailsTheEngine) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  const ScriptRun run = RunScript(setting, ScriptedModel(), ConfigFor(setting),
                                  [](const ScriptedTrainer& trainer, Step& step) {
                                    trainer.Round(step);
                                    trainer.Forward(step, 4);
                                  });
  EXPECT_THAT(run.status, Says("the engine has failed", "Forward('u4')", "ebb.asynchronous_step"));
}

// The error drops the step on every rank, and the engine goes on as if it had never been.
TEST_P(OffPlanScopesTest, IsAnErrorWhereBoundariesBelongToTheEngine) {
  const ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    const Config config = ConfigFor(setting);
    const ScriptRun right =
        RunScript(setting, model, config,
                  [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); });
    ASSERT_OK(right.status);
    for (const OffPlanOrder& order : kOffPlanOrders) {
      SCOPED_TRACE(::testing::Message() << order.name << ", " << setting);
      RunOn(setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (int number = 0; number < 3; ++number) {
          trainer.BeginStep(number, &right.shown[static_cast<size_t>(number)]);
          if (number == 1) {
            Step step = engine.BeginStep({.gradient_divisor = 4});
            Open(order.scopes, trainer, step);
            const absl::Status wrong = FinishAndReport(engine, step);
            EXPECT_THAT(wrong, StatusIs(absl::StatusCode::kFailedPrecondition, kWarning,
                                        "Visit::output_bytes"));
            EXPECT_EQ(engine.Report().status(), wrong);
          }
          Step step = engine.BeginStep({.gradient_divisor = 4});
          trainer.Round(step);
          if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
        }
        EXPECT_EQ(*GatherAll(engine, model, StateClass::kMaster), right.masters);
        return absl::OkStatus();
      });
    }
  }
}

}  // namespace
}  // namespace ebb::testing::scopes_test
