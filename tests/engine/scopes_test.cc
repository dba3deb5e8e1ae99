// Scopes off the declared order, left open, overlapping, or asked for what they do not have: right
// numbers and a warning, or an error that says what to do; never wrong numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <optional>
#include <utility>

#include "ebb/runtime/engine/scope.h"
#include "ebb/sharding/order.h"
#include "tests/engine/scripted.h"
#include "tests/engine/snapshot.h"
#include "tests/offload/scratch.h"
#include "tests/sharding/random_model.h"

namespace ebb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const char kWarning[] = "where the declared order has";

struct Departure {
  const char* name;
  Script script;                  // of one round
  std::vector<int> without = {};  // visits without a backward in it
};

// Backward visits in another order, all of them.
void BackwardOf(const ScriptedTrainer& trainer, Step& step, std::vector<int> visits) {
  for (int visit : visits) trainer.Backward(step, visit);
}
void ForwardOf(const ScriptedTrainer& trainer, Step& step, std::vector<int> units) {
  for (int unit : units) trainer.Forward(step, unit);
}

std::vector<Departure> Departures() {
  return {
      {"ForwardLeftOut",
       [](const ScriptedTrainer& trainer, Step& step) {
         ForwardOf(trainer, step, {0, 1, 2, 4, 0});
         trainer.BackwardAll(step);
       }},
      {"FirstForwardLeftOut",
       [](const ScriptedTrainer& trainer, Step& step) {
         ForwardOf(trainer, step, {1, 2, 3, 4, 0});
         trainer.BackwardAll(step);
       }},
      {"UnitLeftOutOfForwardAndBackward",
       [](const ScriptedTrainer& trainer, Step& step) {
         ForwardOf(trainer, step, {0, 1, 2, 4, 0});
         BackwardOf(trainer, step, {5, 4, 2, 1, 0});
       },
       {3}},
      {"BackwardLeftOut",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         BackwardOf(trainer, step, {5, 3, 2, 1, 0});
       },
       {4}},
      {"NeighboursLeftOutOfBackward",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         BackwardOf(trainer, step, {5, 4, 0});
       },
       {1, 3}},
      {"LastBackwardLeftOut",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         BackwardOf(trainer, step, {5, 4, 3, 2, 1});
       },
       {0}},
      {"ForwardSwapped",
       [](const ScriptedTrainer& trainer, Step& step) {
         ForwardOf(trainer, step, {0, 3, 2, 1, 4, 0});
         trainer.BackwardAll(step);
       }},
      {"FrozenBackwardOutOfOrderAndAgain",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         BackwardOf(trainer, step, {5, 4, 3, 1, 2, 2, 0});
       }},
      {"ForwardAgainBetweenBackwards",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         trainer.Backward(step, 5);
         ForwardOf(trainer, step, {3, 2});
         BackwardOf(trainer, step, {4, 3});
         ForwardOf(trainer, step, {1});
         BackwardOf(trainer, step, {2, 1, 0});
       }},
      {"ForwardAgainAtOnce",
       [](const ScriptedTrainer& trainer, Step& step) {
         ForwardOf(trainer, step, {0, 1, 1, 2, 3, 4, 0});
         trainer.BackwardAll(step);
       }},
      {"ForwardAgainLater",
       [](const ScriptedTrainer& trainer, Step& step) {
         ForwardOf(trainer, step, {0, 1, 2, 3, 1, 4, 0});
         trainer.BackwardAll(step);
       }},
      {"RecomputedByForwardScopes",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
           trainer.Forward(step, kScriptedUnits[visit]);
           trainer.Backward(step, visit);
         }
       }},
      {"WalkRepeated",
       [](const ScriptedTrainer& trainer, Step& step) {
         trainer.ForwardAll(step);
         trainer.ForwardAll(step);
         trainer.BackwardAll(step);
       }},
  };
}

class DepartureTest : public ::testing::TestWithParam<Setting> {
 protected:
  // Runs the declared order and the departure, `rounds` rounds a step of which those in `departing`
  // depart, and compares every view and the masters.
  static void Compare(const Setting& setting, const Departure& departure, Config config,
                      int rounds = 1, std::vector<int> departing = {0}) {
    SCOPED_TRACE(::testing::Message() << departure.name << ", " << setting << ", " << rounds
                                      << " rounds, prefetch " << config.ebb.prefetch_depth);
    config.gradient_accumulation_steps = rounds;
    const ModelSpec model = ScriptedModel();
    const auto departs = [&](int round) {
      return std::find(departing.begin(), departing.end(), round) != departing.end();
    };
    const ScriptRun declared =
        RunScript(setting, model, config, [&](const ScriptedTrainer& trainer, Step& step) {
          for (int r = 0; r < step.rounds(); ++r)
            trainer.Round(step, departs(r) ? departure.without : std::vector<int>());
        });
    ASSERT_TRUE(declared.status.ok()) << declared.status;
    EXPECT_EQ(Occurrences(declared.log, kWarning), 0) << declared.log;
    StepOptions options = kExactStep;
    options.may_leave_out = !departure.without.empty();
    const ScriptRun departed = RunScript(setting, model, config,
                                         [&](const ScriptedTrainer& trainer, Step& step) {
                                           for (int r = 0; r < step.rounds(); ++r) {
                                             if (departs(r)) {
                                               departure.script(trainer, step);
                                             } else {
                                               trainer.Round(step);
                                             }
                                           }
                                         },
                                         {.step = options, .shown = &declared.shown});
    ASSERT_TRUE(departed.status.ok()) << departed.status;
    EXPECT_EQ(departed.masters, declared.masters);
    EXPECT_EQ(Occurrences(departed.log, kWarning), 1) << departed.log;
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, DepartureTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

TEST_P(DepartureTest, GivesTheNumbersOfTheDeclaredOrderAndOneWarning) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const Departure& departure : Departures()) Compare(setting, departure, ConfigFor(setting));
  }
}

TEST_P(DepartureTest, GivesThemAtAnyPrefetchDepthAndInBuckets) {
  Setting setting = GetParam();
  for (const Departure& departure : Departures()) {
    for (const int64_t depth : {0, 2}) {
      setting.timing = depth == 0 ? Timing::kLate : Timing::kEarly;
      Config config = ConfigFor(setting);
      config.ebb.prefetch_depth = depth;
      if (depth == 2) config.ebb.coalesce_bytes = 1200;  // two units or so
      Compare(setting, departure, config);
    }
  }
}

// What leaves the order takes with it what it had on the way from or to the disk.
TEST_P(DepartureTest, GivesThemWithEverythingOnNvme) {
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
    for (const Departure& departure : Departures()) Compare(setting, departure, config);
    const Script round = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
    EXPECT_EQ(RunScript(setting, ScriptedModel(), config, round).masters,
              RunScript(setting, ScriptedModel(), ConfigFor(setting), round).masters);
  }
}

// Departures that leave no doubt about the round: a repeated walk, or a first unit that is left out
// or recomputed, could as well be the next round.
TEST_P(DepartureTest, GivesThemInAnyRound) {
  Setting setting = GetParam();
  for (const Departure& departure : Departures()) {
    const std::string name = departure.name;
    if (name == "WalkRepeated" || name == "RecomputedByForwardScopes") continue;
    for (const ReduceAt at : {ReduceAt::kRound, ReduceAt::kStep}) {
      for (const int round : {0, 1, 2}) {
        setting.timing = round == 1 ? Timing::kEarly : Timing::kLate;
        Config config = ConfigFor(setting);
        config.ebb.reduce_at = at;
        Compare(setting, departure, config, /*rounds=*/3, {round});
      }
    }
  }
}

TEST_P(DepartureTest, GivesThemInAllRounds) {
  Setting setting = GetParam();
  for (const Departure& departure : Departures()) {
    const std::string name = departure.name;
    if (name == "WalkRepeated" || name == "RecomputedByForwardScopes") continue;
    Compare(setting, departure, ConfigFor(setting), /*rounds=*/3, {0, 1, 2});
  }
}

// What was issued before a scope that is held open is there for those behind it: also what updates of
// the step before bring.
TEST_P(DepartureTest, ScopesHeldOpenOverOthersShowWhatIsTheirs) {
  if (GetParam().stage == 0) GTEST_SKIP() << "nothing is offloaded at stage 0";
  if (GetParam().world > 2) GTEST_SKIP() << "a disk for three ranks takes its time";
  Scratch scratch;
  const Script declared = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
  const Script held = [](const ScriptedTrainer& trainer, Step& step) {
    ForwardScope first = step.Forward(UnitId{0});
    trainer.Look(first, 0);
    ForwardOf(trainer, step, {1, 2, 3, 4});
    trainer.Look(first, 0);
    first = {};
    trainer.Forward(step, 0);
    trainer.BackwardAll(step);
  };
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const double ratio : {1.0, 0.5, 0.0}) {
      SCOPED_TRACE(::testing::Message() << setting << ", ratio " << ratio);
      Config config = OnNvme(ConfigFor(setting), scratch.path());
      config.zero.offload_optimizer.ratio = ratio;
      config.zero.offload_param.buffer_count = 1;
      config.zero.sub_group_size = 40;
      config.ebb.reshard_after_forward = false;  // room for all at once
      config.ebb.prefetch_depth = kScriptedVisits;
      const ScriptRun right = RunScript(setting, ScriptedModel(), config, declared);
      ASSERT_TRUE(right.status.ok()) << right.status;
      const ScriptRun run =
          RunScript(setting, ScriptedModel(), config, held, {.shown = &right.shown});
      EXPECT_TRUE(run.status.ok()) << run.status;
      EXPECT_EQ(run.masters, right.masters);
      EXPECT_EQ(Occurrences(run.log, kWarning), 0) << run.log;
      config.ebb.prefetch_depth = 0;  // what is behind the first is gathered when that closes
      if (setting.stage < 3) continue;
      EXPECT_THAT(std::string(RunScript(setting, ScriptedModel(), config, held).status.message()),
                  AllOf(HasSubstr("Forward('u1') while Forward('u0') is open"),
                        HasSubstr("close that scope first, or raise ebb.prefetch_depth")));
    }
  }
}

// What is left out beside a scope that is open is not gathered over what is shown ahead of it.
TEST_P(DepartureTest, ScopesAheadOfOneHeldOpenShowWhatIsTheirs) {
  if (GetParam().stage < 3) GTEST_SKIP() << "every unit is kept whole";
  Scratch scratch;
  int right_runs = 0;
  const auto look = [&](const Setting& setting, Config config) {
    for (const int depth : {0, 1, 2}) {
      config.ebb.prefetch_depth = depth;
      const ScriptRun right = RunScript(
          setting, ScriptedModel(), config,
          [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); }, {.steps = 2});
      ASSERT_TRUE(right.status.ok()) << right.status;
      for (const auto& [held, ahead] : {std::pair{0, 2}, {0, 3}, {0, 4}, {1, 3}, {1, 4}, {2, 4}}) {
        SCOPED_TRACE(::testing::Message() << setting << ", depth " << depth << ", unit " << ahead
                                          << " ahead of " << held);
        const Script script = [&](const ScriptedTrainer& trainer, Step& step) {
          for (int unit = 0; unit < held; ++unit) trainer.Forward(step, unit);
          ForwardScope behind = step.Forward(UnitId{held});
          ForwardScope shown = step.Forward(UnitId{ahead});
          trainer.Look(behind, held);
          trainer.Look(shown, ahead);
          behind = {};
          ForwardScope next = step.Forward(UnitId{ahead == 4 ? 0 : ahead + 1});
          trainer.Look(shown, ahead);
          next = {};
          shown = {};
          if (ahead < 4) ForwardOf(trainer, step, {0});
          trainer.BackwardAll(step);
        };
        // What a scope shows for which there is no room means nothing, and Finish says so.
        const absl::Status status =
            RunScript(setting, ScriptedModel(), config, script, {.steps = 1}).status;
        if (!status.ok()) {
          EXPECT_THAT(std::string(status.message()), HasSubstr("ebb.prefetch_depth"));
          continue;
        }
        ++right_runs;
        const ScriptRun run = RunScript(setting, ScriptedModel(), config, script,
                                        {.steps = 2, .shown = &right.shown});
        EXPECT_TRUE(run.status.ok()) << run.status;
        EXPECT_EQ(run.masters, right.masters);
      }
    }
  };
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    look(setting, ConfigFor(setting));
    if (setting.world > 1) continue;
    Config config = OnNvme(ConfigFor(setting), scratch.path());
    config.zero.offload_param.buffer_count = 1;
    for (const bool reshards : {true, false}) {
      config.ebb.reshard_after_forward = reshards;
      look(setting, config);
    }
  }
  EXPECT_GT(right_runs, 0);
}

// A unit that is gathered for its backward lies where another one may be gathered for a forward outside the order.
TEST_P(DepartureTest, AForwardAgainWhileAnotherIsOpenShowsWhatIsItsOwn) {
  if (GetParam().stage < 3 || GetParam().world != 2) GTEST_SKIP() << "every unit is kept whole";
  int right_runs = 0, refused_runs = 0;
  for (const int depth : {0, 1, 2}) {
    const Setting setting = At(GetParam(), kNotEarly).front();
    Config config = ConfigFor(setting);
    config.ebb.prefetch_depth = depth;
    const ScriptRun right = RunScript(
        setting, ScriptedModel(), config,
        [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); }, {.steps = 1});
    ASSERT_TRUE(right.status.ok()) << right.status;
    for (int number = 0; number < 75; ++number) {
      const int last = number % 3 + 3, first = number / 3 % 5, second = number / 15;
      SCOPED_TRACE(::testing::Message() << "depth " << depth << ", units " << first << " and "
                                        << second << " behind backward " << last);
      const Script script = [&](const ScriptedTrainer& trainer, Step& step) {
        trainer.ForwardAll(step);
        for (int visit = kScriptedVisits - 1; visit >= last; --visit) trainer.Backward(step, visit);
        ForwardScope outer = step.Forward(UnitId{first});
        ForwardScope inner = step.Forward(UnitId{second});
        trainer.Look(outer, first);
        trainer.Look(inner, second);
        inner = {};
        outer = {};
        for (int visit = last - 1; visit >= 0; --visit) trainer.Backward(step, visit);
      };
      const absl::Status status =
          RunScript(setting, ScriptedModel(), config, script, {.steps = 1}).status;
      if (!status.ok()) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("ebb.prefetch_depth"));
        ++refused_runs;
        continue;
      }
      ++right_runs;
      const ScriptRun run =
          RunScript(setting, ScriptedModel(), config, script, {.steps = 1, .shown = &right.shown});
      EXPECT_TRUE(run.status.ok()) << run.status;
      EXPECT_EQ(run.masters, right.masters);
    }
  }
  EXPECT_GT(right_runs, 0);
  EXPECT_GT(refused_runs, 0);
}

// A unit without a forward of its own is updated just ahead of its backward, where the step before carries the update.
TEST_P(DepartureTest, AForwardOutsideTheOrderShowsWhatACarriedUpdateMakes) {
  if (GetParam().stage < 3 || GetParam().world > 2) GTEST_SKIP() << "no update is carried";
  Scratch scratch;
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    for (const int without : {1, 3, 4}) {
      SCOPED_TRACE(::testing::Message() << setting << ", no forward of visit " << without);
      ModelSpec model = ScriptedModel();
      model.forward[static_cast<size_t>(without)].forward = false;
      const Config config = OnNvme(ConfigFor(setting), scratch.path());
      const Script round = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
      const ScriptRun right = RunScript(setting, model, config, round);
      ASSERT_TRUE(right.status.ok()) << right.status;
      const ScriptRun run = RunScript(setting, model, config, round, {.shown = &right.shown});
      EXPECT_TRUE(run.status.ok()) << run.status;
      EXPECT_EQ(run.masters, right.masters);
    }
  }
}

// What has room only after it is an error, which says what to do.
TEST(ScopesHeldOpenTest, AreAnErrorWhereWhatComesNextHasNoRoom) {
  Scratch scratch;
  const auto failed = [](const Setting& setting, const Config& config, int visits_before,
                         const std::vector<int>& backward) {
    const Script script = [&](const ScriptedTrainer& trainer, Step& step) {
      std::deque<ForwardScope> held;
      for (int visit = 0; visit < visits_before; ++visit)
        held.push_back(step.Forward(UnitId{kScriptedUnits[visit]}));
      if (backward.empty()) return;
      for (int round = 0; round + 1 < step.rounds(); ++round) trainer.Round(step);
      trainer.ForwardAll(step);
      BackwardScope open = step.Backward(UnitId{kScriptedUnits[backward.front()]});
      BackwardOf(trainer, step, {backward.begin() + 1, backward.end()});
    };
    return std::string(
        RunScript(setting, ScriptedModel(), config, script, {.steps = 1}).status.message());
  };
  Setting setting{.world = 2, .stage = 3};
  Config config = ConfigFor(setting);
  config.ebb.prefetch_depth = 0;
  EXPECT_THAT(failed(setting, config, 2, {}),
              AllOf(HasSubstr("Forward('u1') while Forward('u0') is open"),
                    HasSubstr("ebb.prefetch_depth")));
  setting.stage = 2;
  EXPECT_THAT(failed(setting, ConfigFor(setting), 0, {5, 4, 3, 2, 1, 0}),
              AllOf(HasSubstr("Backward('u3') while Backward('u0') is open, behind which the "),
                    HasSubstr("close that scope first")));
  setting = {.world = 2, .stage = 3, .timing = Timing::kEarly};
  config = OnNvme(ConfigFor(setting), scratch.path());
  config.zero.offload_param.buffer_count = 1;
  config.gradient_accumulation_steps = 2;
  config.ebb.reduce_at = ReduceAt::kStep;  // each gradient has memory of its own
  EXPECT_THAT(failed(setting, config, 0, {5, 4, 3, 2, 1, 0}),
              AllOf(HasSubstr("while Backward('u0') is open, behind which the gather"),
                    HasSubstr("close that scope first")));
}

// A boundary comes back to the device when the scope before its own opens in its turn.
TEST(ScopesHeldOpenTest, AreAnErrorWhereABoundaryComesBehindThem) {
  Scratch scratch;
  const ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  const Script held = [](const ScriptedTrainer& trainer, Step& step) {
    trainer.ForwardAll(step);
    BackwardScope open = step.Backward(UnitId{0});
    BackwardOf(trainer, step, {4, 3, 2, 1});
    open = {};
    BackwardOf(trainer, step, {0});
  };
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    SCOPED_TRACE(Name(tier));
    const Setting setting{.world = 2, .stage = 3};
    Config config = OnNvme(ConfigFor(setting), scratch.path());
    config.ebb.offload_activations = tier;
    config.ebb.reduce_at = ReduceAt::kStep;
    config.gradient_accumulation_steps = 2;  // each gradient has memory of its own
    config.ebb.reshard_after_forward = false;
    const ScriptRun run = RunScript(setting, model, config,
                                    [&](const ScriptedTrainer& trainer, Step& step) {
                                      trainer.Round(step);
                                      held(trainer, step);
                                    },
                                    {.steps = 1});
    if (tier == Tier::kDevice) {
      EXPECT_TRUE(run.status.ok()) << run.status;
    } else {
      EXPECT_THAT(std::string(run.status.message()),
                  AllOf(HasSubstr("while Backward('u0') is open"), HasSubstr("upload"),
                        HasSubstr("close that scope first")));
    }
  }
}

// A gradient has one place in the order: what comes out of it, or once more, is an error that names the
// scope and where the order is declared. The step is dropped, and the engine goes on.
TEST_P(DepartureTest, ABackwardOutOfOrderOrAgainIsAnErrorThatChangesNothing) {
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
    ASSERT_TRUE(right.status.ok()) << right.status;
    for (const Refused& refused : kRefused) {
      SCOPED_TRACE(::testing::Message() << refused.says << " " << refused.why << ", " << setting);
      const absl::Status status = RunEngines(
          setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            for (int number = 0; number < 3; ++number) {
              trainer.BeginStep(number, nullptr);
              if (number == 1) {
                Step step = engine.BeginStep({.gradient_divisor = 4, .may_leave_out = true});
                trainer.ForwardAll(step);
                BackwardOf(trainer, step, refused.backward);
                const absl::Status wrong = FinishAndReport(engine, step);
                EXPECT_EQ(wrong.code(), absl::StatusCode::kFailedPrecondition) << wrong;
                EXPECT_THAT(std::string(wrong.message()),
                            AllOf(HasSubstr(refused.says), HasSubstr(refused.why),
                                  HasSubstr(sharding::kOrderDeclaredIn)));
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
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// The other ranks hear of it, and wait for no collective that the rank at fault left out.
TEST_P(DepartureTest, ABackwardRefusedOnOneRankIsNamedOnAll) {
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
  EXPECT_TRUE(status.ok()) << status;
}

// Where parts of the step were updated before it, nothing can be right any more.
TEST_P(DepartureTest, ABackwardAgainAfterAnEarlyUpdateFailsTheEngine) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  const ScriptRun run = RunScript(setting, ScriptedModel(), ConfigFor(setting),
                                  [](const ScriptedTrainer& trainer, Step& step) {
                                    trainer.ForwardAll(step);
                                    BackwardOf(trainer, step, {5, 4, 4, 3, 2, 1, 0});
                                  });
  EXPECT_THAT(std::string(run.status.message()),
              AllOf(HasSubstr("the engine has failed"), HasSubstr("Backward('u4')"),
                    HasSubstr(sharding::kOrderDeclaredIn)));
}

// What it showed would be of the next step.
TEST_P(DepartureTest, AForwardAgainAfterAnEarlyUpdateFailsTheEngine) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  const ScriptRun run = RunScript(setting, ScriptedModel(), ConfigFor(setting),
                                  [](const ScriptedTrainer& trainer, Step& step) {
                                    trainer.Round(step);
                                    trainer.Forward(step, 4);
                                  });
  EXPECT_THAT(std::string(run.status.message()),
              AllOf(HasSubstr("the engine has failed"), HasSubstr("Forward('u4')"),
                    HasSubstr("ebb.asynchronous_step")));
}

// The error drops the step on every rank, and the engine goes on as if it had never been.
TEST_P(DepartureTest, IsAnErrorWhereBoundariesBelongToTheEngine) {
  const ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    const Config config = ConfigFor(setting);
    const ScriptRun right =
        RunScript(setting, model, config,
                  [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); });
    ASSERT_TRUE(right.status.ok()) << right.status;
    for (const Departure& departure : Departures()) {
      SCOPED_TRACE(::testing::Message() << departure.name << ", " << setting);
      const absl::Status status = RunEngines(
          setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            for (int number = 0; number < 3; ++number) {
              trainer.BeginStep(number, &right.shown[static_cast<size_t>(number)]);
              if (number == 1) {
                Step step = engine.BeginStep({.gradient_divisor = 4});
                departure.script(trainer, step);
                const absl::Status wrong = FinishAndReport(engine, step);
                EXPECT_EQ(wrong.code(), absl::StatusCode::kFailedPrecondition) << wrong;
                EXPECT_THAT(std::string(wrong.message()),
                            AllOf(HasSubstr(kWarning), HasSubstr("Visit::output_bytes")));
                EXPECT_EQ(engine.Report().status(), wrong);
              }
              Step step = engine.BeginStep({.gradient_divisor = 4});
              trainer.Round(step);
              if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
            }
            EXPECT_EQ(*GatherAll(engine, model, StateClass::kMaster), right.masters);
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// A step of a trainer that leaves out, holds open and opens again what it likes, as far as that is legal:
// the same on every rank. Units 1 to 4 are visited once, so what is opened again cannot be taken for a visit
// to come.
class RandomStep {
 public:
  RandomStep(uint64_t seed, int rounds) : random_(seed), rounds_(rounds) {}

  // Opens what it draws; null: only draws. By round, the visits with a backward that adds nothing.
  std::vector<std::vector<int>> Run(const ScriptedTrainer* trainer, Step* step) {
    std::vector<std::vector<int>> without(static_cast<size_t>(rounds_));
    trainer_ = trainer;
    step_ = step;
    for (std::vector<int>& left_out : without) {
      for (int visit = 0; visit < kScriptedVisits; ++visit) {
        // The first Forward tells rounds apart.
        if (visit == 0 || !random_.OneIn(6)) Forward(kScriptedUnits[visit]);
        if (visit > 0 && random_.OneIn(3)) Forward(Between(1, std::min(visit, 4)));
      }
      for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
        // As the last one tells the rounds apart, too.
        const bool leaves_out = visit > 0 && random_.OneIn(6);
        if (leaves_out) left_out.push_back(visit);
        if (!leaves_out) Backward(visit);
        // Its own backward is still to come.
        if (visit > 1 && random_.OneIn(3)) Forward(Between(1, std::min(visit - 1, 4)));
      }
      Close(/*all=*/true);
    }
    return without;
  }

 private:
  int Between(int low, int high) { return static_cast<int>(random_.Between(low, high)); }

  void Forward(int unit) {
    const bool holds = random_.OneIn(8);
    if (trainer_ != nullptr) {
      held_.push_back({step_->Forward(UnitId{unit}), unit});
      trainer_->Look(held_.back().scope, unit);
    }
    if (!holds) Close(random_.OneIn(2));
  }
  void Backward(int visit) {
    if (trainer_ != nullptr) trainer_->Backward(*step_, visit);
    Close(random_.OneIn(2));
  }
  // The newest, or all of them.
  void Close(bool all) {
    while (!held_.empty()) {
      trainer_->Look(held_.back().scope, held_.back().unit);
      held_.pop_back();
      if (!all) return;
    }
  }

  struct Held {
    ForwardScope scope;
    int unit;
  };
  sharding::Random random_;
  const int rounds_;
  const ScriptedTrainer* trainer_ = nullptr;
  Step* step_ = nullptr;
  std::vector<Held> held_;
};

TEST_P(DepartureTest, RandomTrainersGiveTheNumbersOfTheDeclaredOrder) {
  if (GetParam().world > 2) GTEST_SKIP() << "a disk for three ranks takes its time";
  Scratch scratch;
  int right_runs = 0, runs = 0;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Setting setting = GetParam();
    setting.timing = kTimings[seed % 3];
    Config config = ConfigFor(setting);
    const bool on_nvme = setting.stage > 0 && seed % 4 == 0;
    if (on_nvme) config = OnNvme(config, scratch.path());
    const int rounds = seed % 2 == 0 ? 2 : 1;
    config.gradient_accumulation_steps = rounds;
    config.ebb.reduce_at = seed % 8 < 4 ? ReduceAt::kRound : ReduceAt::kStep;
    config.ebb.prefetch_depth = static_cast<int64_t>(seed / 2 % 4);
    if (seed % 5 == 0) config.ebb.coalesce_bytes = 1200;
    config.ebb.reshard_after_forward = seed % 7 != 0;
    SCOPED_TRACE(::testing::Message() << setting << ", seed " << seed);
    const auto drawn = [&](const ScriptedTrainer& trainer) {
      return RandomStep(seed * 100 + static_cast<uint64_t>(trainer.step()), rounds);
    };
    const ScriptRun declared = RunScript(
        setting, ScriptedModel(), config, [&](const ScriptedTrainer& trainer, Step& step) {
          for (const std::vector<int>& without : drawn(trainer).Run(nullptr, nullptr))
            trainer.Round(step, without);
        });
    ASSERT_TRUE(declared.status.ok()) << declared.status;
    const Script script = [&](const ScriptedTrainer& trainer, Step& step) {
      drawn(trainer).Run(&trainer, &step);
    };
    ScriptOptions options{.step = kExactStep};
    options.step.may_leave_out = true;
    ++runs;
    // What a scope shows for which there is no room means nothing, and Finish says so.
    if (const ScriptRun tried = RunScript(setting, ScriptedModel(), config, script, options);
        !tried.status.ok()) {
      EXPECT_THAT(
          std::string(tried.status.message()),
          ::testing::AnyOf(HasSubstr("close that scope first"), HasSubstr("gather pool has room")));
      continue;
    }
    ++right_runs;
    options.shown = &declared.shown;
    const ScriptRun run = RunScript(setting, ScriptedModel(), config, script, options);
    EXPECT_TRUE(run.status.ok()) << run.status;
    EXPECT_EQ(run.masters, declared.masters);
  }
  EXPECT_GT(right_runs, GetParam().stage < 3 ? runs - 1 : 1);
}

}  // namespace
}  // namespace ebb::testing
