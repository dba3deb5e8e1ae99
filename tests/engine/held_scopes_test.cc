// Scopes that are open beside others, and random trainers that hold scopes open, leave them out and
// open them again: right numbers, or an error that says what to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/scope.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/sharding/random_model.h"
#include "tests/status.h"

namespace ebb::testing::held_scopes_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const char kWarning[] = "where the declared order has";

using HeldScopesTest = ::testing::TestWithParam<Setting>;
INSTANTIATE_TEST_SUITE_P(Cells, HeldScopesTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 1, .stage = 2})), NameOf);

// Work issued before a scope that is held open is there for later scopes, also the results of
// carried updates.
TEST_P(HeldScopesTest, ScopesHeldOpenOverOthersShowTheirOwnUnits) {
  if (GetParam().stage == 0) GTEST_SKIP() << "nothing is offloaded at stage 0";
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
      ASSERT_OK(right.status);
      const ScriptRun run =
          RunScript(setting, ScriptedModel(), config, held, {.shown = &right.shown});
      EXPECT_OK(run.status);
      EXPECT_EQ(run.masters, right.masters);
      EXPECT_EQ(Occurrences(run.log, kWarning), 0) << run.log;
      config.ebb.prefetch_depth =
          0;  // the gathers for later scopes are issued when the first closes
      if (setting.stage < 3) continue;
      EXPECT_THAT(RunScript(setting, ScriptedModel(), config, held).status,
                  Says("Forward('u1') while Forward('u0') is open",
                       "close that scope first, or raise ebb.prefetch_depth"));
    }
  }
}

// Units left out beside an open scope are not gathered over units that are shown ahead of it.
TEST_P(HeldScopesTest, ScopesAheadOfAHeldOneShowTheirOwnUnits) {
  if (GetParam().stage < 3) GTEST_SKIP() << "every unit is kept whole";
  Scratch scratch;
  int right_runs = 0;
  const auto look = [&](const Setting& setting, Config config) {
    for (const int depth : {0, 1, 2}) {
      config.ebb.prefetch_depth = depth;
      const ScriptRun right = RunScript(
          setting, ScriptedModel(), config,
          [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); }, {.steps = 2});
      ASSERT_OK(right.status);
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
        const ScriptRun run = RunScript(setting, ScriptedModel(), config, script,
                                        {.steps = 2, .shown = &right.shown});
        if (!run.status.ok()) {
          EXPECT_THAT(run.status, Says("ebb.prefetch_depth"));
          continue;
        }
        ++right_runs;
        EXPECT_EQ(run.masters, right.masters);
      }
    }
  };
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    look(setting, ConfigFor(setting));
    if (setting.world > 2) continue;
    Config config = OnNvme(ConfigFor(setting), scratch.path());
    config.zero.offload_param.buffer_count = 1;
    for (const bool reshards : {true, false}) {
      config.ebb.reshard_after_forward = reshards;
      look(setting, config);
    }
  }
  EXPECT_GT(right_runs, 0);
}

// A unit that is gathered for its backward lies where another one may be gathered for a forward
// outside the order.
TEST_P(HeldScopesTest, AForwardAgainBesideAnotherShowsItsOwnUnit) {
  if (GetParam().stage < 3 || GetParam().world != 2) GTEST_SKIP() << "every unit is kept whole";
  Scratch scratch;
  int right_runs = 0, refused_runs = 0;
  const Setting setting = At(GetParam(), kNotEarly).front();
  const Config on_device = ConfigFor(setting);
  // On NVMe the forward of the second step does the updates of the first.
  for (const auto& [depth, steps] : {std::pair(0, 1), {1, 1}, {2, 1}, {1, 2}}) {
    Config config = steps == 1 ? on_device : OnNvme(on_device, scratch.path());
    config.ebb.prefetch_depth = depth;
    const ScriptRun right = RunScript(
        setting, ScriptedModel(), config,
        [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); }, {.steps = steps});
    ASSERT_OK(right.status);
    // Both units with each other and with each visit.
    for (int number = 0; number < 75; ++number) {
      if (!Full() && (number / 3 + number / 15 + depth + steps) % 3 != number % 3) continue;
      const int at = number % 3 + 2, units = steps == 1 ? 5 : at;
      const int first = number / 3 % 5 % units, second = number / 15 % units;
      SCOPED_TRACE(::testing::Message() << "depth " << depth << ", steps " << steps << ", units "
                                        << first << " and " << second << " behind visit " << at);
      const Script script = [&](const ScriptedTrainer& trainer, Step& step) {
        const int scopes = steps == 1 ? kScriptedScopes - 1 - at : at;
        DeclaredScopes(trainer, step, 0, scopes);
        ForwardScope outer = step.Forward(UnitId{first});
        ForwardScope inner = step.Forward(UnitId{second});
        trainer.Look(outer, first);
        trainer.Look(inner, second);
        inner = {};
        outer = {};
        DeclaredScopes(trainer, step, scopes, kScriptedScopes);
      };
      const ScriptRun run = RunScript(setting, ScriptedModel(), config, script,
                                      {.steps = steps, .shown = &right.shown});
      if (!run.status.ok()) {
        EXPECT_THAT(run.status, Says("ebb.prefetch_depth"));
        ++refused_runs;
        continue;
      }
      ++right_runs;
      EXPECT_EQ(run.masters, right.masters);
    }
  }
  EXPECT_GT(right_runs, 0);
  EXPECT_GT(refused_runs, 0);
}

// A unit without a forward is updated just ahead of its backward, if the step before carries the
// update.
TEST_P(HeldScopesTest, AForwardOutsideTheOrderShowsTheCarriedUpdate) {
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
      ASSERT_OK(right.status);
      const ScriptRun run = RunScript(setting, model, config, round, {.shown = &right.shown});
      EXPECT_OK(run.status);
      EXPECT_EQ(run.masters, right.masters);
    }
  }
}

// A scope that has room only after an open one is an error, which says what to do.
TEST(ScopesHeldOpenTest, AreAnErrorIfTheNextScopeHasNoRoom) {
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
              AllOf(HasSubstr("Backward('u3') while Backward('u0') is open: the plan has the "),
                    HasSubstr("close that scope first")));
  setting = {.world = 2, .stage = 3, .timing = Timing::kEarly};
  config = OnNvme(ConfigFor(setting), scratch.path());
  config.zero.offload_param.buffer_count = 1;
  config.gradient_accumulation_steps = 2;
  config.ebb.reduce_at = ReduceAt::kStep;  // each gradient has its own memory
  EXPECT_THAT(failed(setting, config, 0, {5, 4, 3, 2, 1, 0}),
              AllOf(HasSubstr("while Backward('u0') is open: the plan has the gather"),
                    HasSubstr("close that scope first")));
}

// Behind a scope that is held open, the rounds between it and another one are not issued: neither
// are their reductions, which read what the next round writes over.
TEST(ScopesHeldOpenTest, AreAnErrorIfAWholeRoundFollows) {
  ModelSpec model;
  for (const char* name : {"first", "second", "frozen"}) {
    const UnitId unit = model.AddUnit(name);
    model.Add(unit, {.name = absl::StrCat(name, ".w"),
                     .shape = {256},
                     .init = Constant(1),
                     .trainable = unit != UnitId{2}});
    model.forward.push_back({.unit = unit, .backward = unit != UnitId{2}});
  }
  for (const int visit : {0, 1}) model.AddScope({.visit = visit});
  for (const int visit : {1, 0}) model.AddScope({.backward = true, .visit = visit});
  model.AddScope({.visit = 2});
  const Setting setting{.world = 2, .stage = 2};
  Config config = ConfigFor(setting);
  config.gradient_accumulation_steps = 5;
  config.ebb.reduce_at = ReduceAt::kRound;
  const auto held_over = [&](int rounds) {
    const Script script = [&](const ScriptedTrainer&, Step& step) {
      ForwardScope held;
      for (int round = 0; round < step.rounds(); ++round) {
        if (round == rounds + 1) held.Close();
        for (const int unit : {0, 1}) (void)step.Forward(UnitId{unit});
        for (const int unit : {1, 0}) (void)step.Backward(UnitId{unit});
        ForwardScope last = step.Forward(UnitId{2});
        if (round == 0) held = std::move(last);
      }
    };
    return RunScript(setting, model, config, script, {.steps = 1}).status;
  };
  for (const int rounds : {0, 1}) EXPECT_OK(held_over(rounds));
  for (const int rounds : {2, 3})
    EXPECT_THAT(held_over(rounds),
                Says("Forward('first') while Forward('frozen') is open: the plan has",
                     "close that scope first"));
}

// A boundary comes back to the device when the scope before its own opens in its turn.
TEST(ScopesHeldOpenTest, AreAnErrorIfABoundaryFollows) {
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
    config.gradient_accumulation_steps = 2;  // each gradient has its own memory
    config.ebb.reshard_after_forward = false;
    const ScriptRun run = RunScript(setting, model, config,
                                    [&](const ScriptedTrainer& trainer, Step& step) {
                                      trainer.Round(step);
                                      held(trainer, step);
                                    },
                                    {.steps = 1});
    if (tier == Tier::kDevice) {
      EXPECT_OK(run.status);
    } else {
      EXPECT_THAT(run.status,
                  Says("while Backward('u0') is open", "upload", "close that scope first"));
    }
  }
}

// A step of a random trainer that leaves scopes out, holds them open and opens them again, as far
// as that is legal: the same on every rank. Units 1 to 4 are visited once, so a scope that is
// opened again cannot be taken for a later visit.
class RandomStep {
 public:
  RandomStep(uint64_t seed, int rounds) : random_(seed), rounds_(rounds) {}

  // Opens the drawn scopes; null: only draws. By round, the visits with a backward that adds
  // nothing.
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
        // The last visit also tells the rounds apart.
        const bool leaves_out = visit > 0 && random_.OneIn(6);
        if (leaves_out) left_out.push_back(visit);
        if (!leaves_out) Backward(visit);
        // The unit's own backward is still to come.
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

TEST_P(HeldScopesTest, RandomTrainersGiveTheNumbersOfTheDeclaredOrder) {
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
    ASSERT_OK(declared.status);
    const Script script = [&](const ScriptedTrainer& trainer, Step& step) {
      drawn(trainer).Run(&trainer, &step);
    };
    ScriptOptions options{.step = kExactStep};
    options.step.may_leave_out = true;
    options.shown = &declared.shown;
    ++runs;
    const ScriptRun run = RunScript(setting, ScriptedModel(), config, script, options);
    if (!run.status.ok()) {
      EXPECT_THAT(
          std::string(run.status.message()),
          ::testing::AnyOf(HasSubstr("close that scope first"), HasSubstr("gather pool has room")));
      continue;
    }
    ++right_runs;
    EXPECT_EQ(run.masters, declared.masters);
  }
  EXPECT_GT(right_runs, GetParam().stage < 3 ? runs - 1 : 1);
}

}  // namespace
}  // namespace ebb::testing::held_scopes_test
