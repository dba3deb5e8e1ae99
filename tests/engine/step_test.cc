// A step from BeginStep to Finish: the scopes that Finish closes, the objects that are dead after
// it, its errors, and that a dropped or refused step leaves no trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/status.h"

namespace ebb::testing::step_test {
namespace {

constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
const ParameterId kEmbedding{0}, kFrozen{3};  // of units 0 and 1

void ExpectDead(ForwardScope& scope) {
  EXPECT_EQ(scope.parameter(kEmbedding).data, nullptr);
  EXPECT_EQ(scope.parameter(kEmbedding).size(), 0);
  EXPECT_TRUE(scope.micro_batches().empty());
  EXPECT_EQ(scope.input(0).data, nullptr);
  EXPECT_EQ(scope.output(0).data, nullptr);
  scope.Close();
  scope.Close();
}
void ExpectDead(BackwardScope& scope) {
  EXPECT_EQ(scope.parameter(kEmbedding).data, nullptr);
  EXPECT_TRUE(scope.micro_batches().empty());
  EXPECT_EQ(scope.input(0).data, nullptr);
  EXPECT_EQ(scope.gradient(kEmbedding).data, nullptr);
  EXPECT_EQ(scope.fused_gradient(kEmbedding).tensor.data, nullptr);
  EXPECT_EQ(scope.output_gradient(0).data, nullptr);
  EXPECT_EQ(scope.input_gradient(0).data, nullptr);
  scope.Close();
  scope.Close();
}
void ExpectDead(Step& step) {
  EXPECT_EQ(step.rounds(), 0);
  ForwardScope forward = step.Forward(UnitId{0});
  ExpectDead(forward);
  BackwardScope backward = step.Backward(UnitId{0});
  ExpectDead(backward);
  EXPECT_EQ(step.loss_scale(), 1);
  const float loss = 1e6;
  step.AddLoss({.data = &loss});
  EXPECT_EQ(step.Reduce().code(), kPrecondition);
  const absl::Status finished = step.Finish();
  EXPECT_EQ(finished.code(), kPrecondition);
  EXPECT_FALSE(finished.message().empty());
}

class StepTest : public ::testing::TestWithParam<Setting> {
 protected:
  using Body = std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>;
  void Run(const Setting& setting, const Body& body) {
    RunOn(setting, model_, ConfigFor(setting), body);
  }
  // Trains two steps with `between` after the first, which must leave no trace in state or report.
  void ExpectNoTrace(const Setting& setting, const Body& between) {
    std::vector<Snapshot> plain(static_cast<size_t>(setting.world));
    for (const bool with : {false, true}) {
      Run(setting, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
        if (with) EBB_RETURN_IF_ERROR(between(engine, trainer));
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 1));
        EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(engine, model_));
        EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
        EXPECT_EQ(report.step, 2) << setting;
        EXPECT_EQ(report.loss, 0) << setting;
        Snapshot& expected = plain[static_cast<size_t>(trainer.rank())];
        if (!with) expected = after;
        EXPECT_EQ(after, expected) << setting;
        return absl::OkStatus();
      });
    }
  }
  ModelSpec model_ = ScriptedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, StepTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 0})), NameOf);

TEST_P(StepTest, FinishClosesOpenScopesAndAllLaterCallsAreErrors) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    std::vector<Snapshot> closed(static_cast<size_t>(setting.world));
    for (const bool leave_open : {false, true}) {
      Run(setting, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        Step step = engine.BeginStep(kExactStep);
        trainer.ForwardAll(step);
        for (int v = kScriptedVisits - 1; v > 0; --v) trainer.Backward(step, v);
        BackwardScope backward = step.Backward(UnitId{0});
        trainer.Add(backward, 0);
        if (!leave_open) backward.Close();
        EBB_RETURN_IF_ERROR(step.Finish());
        ExpectDead(step);
        ExpectDead(backward);
        // Nor do they come to life, or do harm, in the next step.
        Step next = engine.BeginStep(kExactStep);
        trainer.Forward(next, 0);
        ExpectDead(backward);
        for (int s = 1; s < kScriptedVisits; ++s) trainer.Forward(next, kScriptedUnits[s]);
        trainer.BackwardAll(next);
        EBB_RETURN_IF_ERROR(next.Finish());
        EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
        EXPECT_EQ(report.loss, 0);
        EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(engine, model_));
        Snapshot& expected = closed[static_cast<size_t>(trainer.rank())];
        if (!leave_open) expected = after;
        EXPECT_EQ(after, expected) << setting;
        return absl::OkStatus();
      });
    }
  }
}

TEST_P(StepTest, AScopeThatDidNotOpenClosesNoOther) {
  std::vector<Snapshot> plain(static_cast<size_t>(GetParam().world));
  for (const bool with : {false, true}) {
    Run(GetParam(), [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      Step over = engine.BeginStep(kExactStep);
      trainer.Round(over);
      EBB_RETURN_IF_ERROR(over.Finish());
      Step step = engine.BeginStep(kExactStep);
      trainer.ForwardAll(step);
      BackwardScope held = step.Backward(UnitId{0});
      if (with) ExpectDead(over);
      EXPECT_NE(held.parameter(kEmbedding).data, nullptr);
      trainer.Add(held, kScriptedVisits - 1);
      held.Close();
      for (int v = kScriptedVisits - 1; v-- > 0;) trainer.Backward(step, v);
      EBB_RETURN_IF_ERROR(FinishAndReport(engine, step));
      EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(engine, model_));
      Snapshot& expected = plain[static_cast<size_t>(trainer.rank())];
      if (!with) expected = after;
      EXPECT_EQ(after, expected);
      return absl::OkStatus();
    });
  }
}

TEST_P(StepTest, CallsOnAMovedOrDroppedStepAreErrors) {
  Run(GetParam(), [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    Step never;
    ForwardScope no_forward;
    BackwardScope no_backward;
    ExpectDead(never);
    ExpectDead(no_forward);
    ExpectDead(no_backward);
    ForwardScope of_dropped;
    {
      Step dropped = engine.BeginStep(kExactStep);
      of_dropped = dropped.Forward(UnitId{0});
      EXPECT_EQ(of_dropped.parameter(kEmbedding).size(), 11 * 9);
    }
    ExpectDead(of_dropped);
    Step from = engine.BeginStep(kExactStep);
    Step step = std::move(from);
    ExpectDead(from);
    trainer.Round(step);
    return step.Finish();
  });
}

TEST_P(StepTest, FinishWithoutAnyBackwardIsAnErrorThatLeavesNothing) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const int forwards : {0, 1, kScriptedVisits}) {
      ExpectNoTrace(setting, [&](Engine& engine, ScriptedTrainer& trainer) {
        Step step = engine.BeginStep(kExactStep);
        DeclaredScopes(trainer, step, 0, forwards);
        ForwardScope open;
        if (forwards < kScriptedVisits) open = step.Forward(UnitId{kScriptedUnits[forwards]});
        const absl::Status finished = FinishAndReport(engine, step);
        ExpectDead(open);
        ExpectDead(step);
        EXPECT_THAT(finished,
                    StatusIs(kPrecondition, "Finish without any Backward", "BeginEvaluation"));
        EXPECT_EQ(engine.Report().status(), finished);
        return absl::OkStatus();
      });
    }
  }
}

// At every point of a step, with its last scope open and closed.
TEST_P(StepTest, ADroppedStepLeavesNothing) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    ExpectNoTrace(setting, [&](Engine& engine, ScriptedTrainer& trainer) {
      const float loss = 100;
      for (int scopes = 0; scopes <= kScriptedScopes + 1; ++scopes) {
        StepOptions options = kExactStep;
        options.hold_updates = setting.timing == Timing::kEarly || scopes > kScriptedScopes;
        trainer.BeginStep(/*step=*/7 + scopes, nullptr);
        Step step = engine.BeginStep(options);
        step.AddLoss({.data = &loss});
        DeclaredScopes(trainer, step, 0, std::min(scopes, kScriptedScopes));
        ForwardScope forward;
        BackwardScope backward;
        if (scopes < kScriptedVisits) forward = step.Forward(UnitId{kScriptedUnits[scopes]});
        if (scopes >= kScriptedVisits && scopes < kScriptedScopes)
          backward = step.Backward(UnitId{kScriptedUnits[kScriptedScopes - 1 - scopes]});
        EXPECT_TRUE(scopes <= kScriptedScopes || step.Reduce().ok());
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(StepTest, ABackwardAfterReduceIsAnError) {
  Run(GetParam(), [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    StepOptions options = kExactStep;
    options.hold_updates = true;
    trainer.BeginStep(/*step=*/1, nullptr);
    Step step = engine.BeginStep(options);
    trainer.Round(step);
    EXPECT_OK(step.Reduce());
    BackwardScope late = step.Backward(UnitId{1});
    ExpectDead(late);
    const absl::Status finished = FinishAndReport(engine, step);
    EXPECT_THAT(finished, StatusIs(kPrecondition, "after Step::Reduce"));
    return absl::OkStatus();
  });
}

TEST_P(StepTest, DroppedAfterItsFirstEarlyUpdateItFailsTheEngine) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  Run(setting, [&](Engine& engine, ScriptedTrainer& trainer) {
    {
      Step step = engine.BeginStep(kExactStep);
      DeclaredScopes(trainer, step, 0, kScriptedScopes);
    }
    const absl::Status failed = engine.Report().status();
    EXPECT_THAT(failed,
                StatusIs(absl::StatusCode::kAborted, "the engine has failed", "hold_updates"));
    EXPECT_EQ(TrainStep(engine, trainer, 1).code(), absl::StatusCode::kAborted);
    EXPECT_EQ(GatherAll(engine, model_, StateClass::kMaster).status(), failed);
    return absl::OkStatus();
  });
}

TEST_P(StepTest, OnlyOneStepIsAliveAndNoEvaluationBesideItsScopes) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const bool evaluation : {false, true}) {
      ExpectNoTrace(setting, [&](Engine& engine, ScriptedTrainer& trainer) {
        Step first = engine.BeginStep(kExactStep);
        if (evaluation) {
          const ForwardScope open = first.Forward(UnitId{0});
          Evaluation second = engine.BeginEvaluation();
          ForwardScope scope = second.Forward(UnitId{0});
          ExpectDead(scope);
          EXPECT_EQ(second.Finish().status().code(), kPrecondition);
        } else {
          Step second = engine.BeginStep(kExactStep);
          ExpectDead(second);
        }
        trainer.Round(first);
        const absl::Status finished = FinishAndReport(engine, first);
        EXPECT_THAT(
            finished,
            StatusIs(kPrecondition, evaluation ? "BeginEvaluation while" : "BeginStep while",
                     evaluation ? "close that scope first" : "finish or drop that one first"));
        return absl::OkStatus();
      });
    }
  }
}

// On one rank only: the step fails on all, and names that rank to the others.
TEST_P(StepTest, AWrongRequestOfOneRankFailsTheStepOfAll) {
  struct Request {
    const char* what;
    std::function<void(Step&, BackwardScope&)> make;
  };
  const float three[3] = {};
  const Request requests[] = {
      {"'base1', which is frozen",
       [](Step&, BackwardScope& scope) {
         const MutableTensorView view = scope.gradient(kFrozen);
         EXPECT_EQ(view.data, nullptr);
         EXPECT_EQ(view.size(), 0);
       }},
      {"'base1', which is frozen",
       [](Step&, BackwardScope& s) { EXPECT_EQ(s.fused_gradient(kFrozen).tensor.size(), 0); }},
      {"parameter 'embedding' asked of Backward('u1'), which does not hold it: it is of unit 'u0'",
       [](Step&, BackwardScope& s) { EXPECT_EQ(s.parameter(kEmbedding).data, nullptr); }},
      {"gradient of parameter 99",
       [](Step&, BackwardScope& s) { EXPECT_EQ(s.gradient(ParameterId{99}).data, nullptr); }},
      {"AddLoss takes one fp32 scalar",
       [&](Step& step, BackwardScope&) {
         step.AddLoss({.data = &three, .shape = model_.parameters[0].shape});
       }},
      {"AddLoss takes one fp32 scalar", [](Step& step, BackwardScope&) { step.AddLoss({}); }},
  };
  const int culprit = GetParam().world - 1;
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    ExpectNoTrace(setting, [&](Engine& engine, ScriptedTrainer& trainer) {
      for (const Request& request : requests) {
        Step step = engine.BeginStep(kExactStep);
        trainer.ForwardAll(step);
        for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
          BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
          trainer.Add(scope, visit);
          if (visit == 1 && trainer.rank() == culprit) request.make(step, scope);
        }
        const absl::Status finished = FinishAndReport(engine, step);
        EXPECT_THAT(finished, StatusIs(kInvalid, request.what));
        const std::string who = trainer.rank() == culprit ? "" : absl::StrCat("rank ", culprit);
        EXPECT_THAT(finished, Says(who));
      }
      return absl::OkStatus();
    });
  }
}

// Steps of any number of rounds. An engine plans three: the first, one for all in the middle, and
// the last.

constexpr int kRounds[] = {3, 1, 64, 2, 5, 4, 64, 3};

class RoundsTest : public ::testing::TestWithParam<Setting> {
 protected:
  // The masters behind steps of those rounds, one after another.
  ParameterValues MastersAfter(const Setting& setting, Config config) const {
    config.gradient_accumulation_steps = 3;
    ParameterValues masters;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      const size_t operations = engine.program().plan().ops.size();
      int64_t number = 0;
      for (const int rounds : kRounds) {
        StepOptions options = kExactStep;
        options.micro_batches = rounds;
        ASSERT_OK(TrainStep(engine, trainer, number++, options));
        for (const TrafficRow& row : engine.traffic())
          EXPECT_EQ(row.bytes, row.predicted_bytes) << rounds << " rounds";
        for (const CommunicationRow& row : engine.communication())
          EXPECT_EQ(row.bytes, row.predicted_bytes) << rounds << " rounds";
      }
      EXPECT_EQ(engine.program().plan().ops.size(), operations);
      ASSERT_OK_AND_ASSIGN(const ParameterValues all,
                           GatherAll(engine, model_, StateClass::kMaster));
      if (trainer.rank() == 0) masters = all;
    });
    return masters;
  }
  // This rank's gradients of held steps are the sums of all of their micro-batches.
  void ExpectSums(const Setting& setting, Config config) const {
    config.gradient_accumulation_steps = 3;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      int64_t number = 0;
      for (const int rounds : kRounds) {
        trainer.BeginStep(number, nullptr);
        Step step = engine.BeginStep(
            {.micro_batches = rounds, .gradient_divisor = 8, .hold_updates = true});
        EXPECT_EQ(step.rounds(), rounds);
        for (int round = 0; round < rounds; ++round) trainer.Round(step);
        ASSERT_OK(step.Reduce());
        ASSERT_OK_AND_ASSIGN(const ParameterValues slices,
                             ReadSlices(engine, model_, StateClass::kGradient));
        const ParameterValues sums = GradientSums(model_, setting.world, number++, rounds);
        for (size_t p = 0; p < sums.size(); ++p) {
          for (size_t i = 0; i < sums[p].size(); ++i) {
            if (std::isnan(slices[p][i])) continue;  // another rank's
            EXPECT_EQ(slices[p][i], sums[p][i] / 8) << rounds << " rounds, parameter " << p;
          }
        }
        ASSERT_OK(step.Finish());
      }
    });
  }

  const ModelSpec model_ = ScriptedModel();
  const Scratch folder_;
};
INSTANTIATE_TEST_SUITE_P(Cells, RoundsTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 1, .stage = 1})), NameOf);

TEST_P(RoundsTest, AnyNumberIsTheSameWhereverStateLives) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    SCOPED_TRACE(setting);
    // Early updates are without clipping.
    const Setting plain{.world = setting.world, .timing = setting.timing};
    const ParameterValues expected = MastersAfter(plain, ConfigFor(plain));
    Config config = ConfigFor(setting);
    EXPECT_EQ(MastersAfter(setting, config), expected);
    for (const int64_t depth : {0, 3}) {
      config.ebb.prefetch_depth = depth;
      config.ebb.coalesce_bytes = depth == 0 ? 0 : 1200;
      EXPECT_EQ(MastersAfter(setting, OnNvme(config, folder_.path())), expected);
    }
  }
}

TEST_P(RoundsTest, HeldGradientsAreTheSumsOfAllRounds) {
  ExpectSums(GetParam(), ConfigFor(GetParam()));
  ExpectSums(GetParam(), OnNvme(ConfigFor(GetParam()), folder_.path()));
}

// An overlap by one scope also crosses the end of a round.
TEST_P(RoundsTest, AScopeMayCloseAfterTheNextRoundHasOpened) {
  const auto run = [&](bool overlaps) {
    Config config = ConfigFor(GetParam());
    config.gradient_accumulation_steps = 5;
    return RunScript(GetParam(), model_, config,
                     [&](const ScriptedTrainer& trainer, Step& step) {
                       std::optional<BackwardScope> last;
                       for (int round = 0; round < step.rounds(); ++round) {
                         {
                           const ForwardScope first = step.Forward(UnitId{kScriptedUnits[0]});
                           trainer.Look(first, kScriptedUnits[0]);
                           last.reset();
                         }
                         for (int visit = 1; visit < kScriptedVisits; ++visit)
                           trainer.Forward(step, kScriptedUnits[visit]);
                         for (int visit = kScriptedVisits - 1; visit > 0; --visit)
                           trainer.Backward(step, visit);
                         BackwardScope scope = step.Backward(UnitId{kScriptedUnits[0]});
                         trainer.Look(scope, kScriptedUnits[0]);
                         trainer.Add(scope, 0);
                         if (overlaps && round + 1 < step.rounds()) last.emplace(std::move(scope));
                       }
                     },
                     {.step = kExactStep});
  };
  const ScriptRun apart = run(false), overlapping = run(true);
  EXPECT_OK(apart.status);
  EXPECT_OK(overlapping.status);
  EXPECT_EQ(overlapping.masters, apart.masters);
}

}  // namespace
}  // namespace ebb::testing::step_test
