// Gradients and losses that are not finite. The step is skipped on every rank and counted. If
// overflow checks are off, it is an error that names the first such gradient.
#include "ebb/runtime/engine/outcome/step_errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/engine/outcome/scope_trail.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/sharding/random_model.h"
#include "tests/status.h"

namespace ebb::testing::step_errors_test {
namespace {

constexpr float kNotNumbers[] = {std::numeric_limits<float>::quiet_NaN(),
                                 std::numeric_limits<float>::infinity(),
                                 -std::numeric_limits<float>::infinity()};

// A round in which one element of the gradient of u3 on the last rank is `value`.
void RoundWith(const ScriptedTrainer& trainer, Step& step, float value, int culprit) {
  trainer.ForwardAll(step);
  for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
    BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
    trainer.Add(scope, visit);
    if (visit != 3 || trainer.rank() != culprit) continue;
    std::vector<float> values(130);
    values[77] = value;
    AddTo(scope.gradient(ParameterId{5}), values);
  }
}

class OverflowTest : public ::testing::TestWithParam<Setting> {
 protected:
  int culprit() const { return GetParam().world - 1; }
};
INSTANTIATE_TEST_SUITE_P(Cells, OverflowTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 2})), NameOf);

// The masters end as if the step had not been.
TEST_P(OverflowTest, SkipsTheStepOnEveryRankInEveryDType) {
  const ModelSpec model = ScriptedModel();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Setting& setting : At(GetParam(), kNotEarly)) {
      Config config = ConfigFor(setting);
      config.compute = dtype;
      config.loss_scale.static_scale =
          dtype == DType::kFloat16 ? 8 : 0;  // where it is dynamic it moves
      const auto train = [&](int64_t skipped_step, float value, ParameterValues& masters) {
        RunOn(setting, model, config,
              [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                for (int64_t number = 0, done = 0; done < 3; ++number) {
                  const bool skips = number == skipped_step;
                  trainer.BeginStep(done, nullptr);
                  Step step = engine.BeginStep({.gradient_divisor = 4});
                  RoundWith(trainer, step, skips ? value : 0, culprit());
                  if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
                  const absl::StatusOr<StepReport> report = engine.Report();
                  if (!report.ok()) return report.status();
                  EXPECT_EQ(report->applied, !skips);
                  EXPECT_EQ(report->skipped_steps, number >= skipped_step ? 1 : 0);
                  EXPECT_EQ(report->step, number + 1);
                  EXPECT_EQ(std::isfinite(report->gradient_norm), !skips);
                  done += skips ? 0 : 1;
                }
                absl::StatusOr<ParameterValues> all = GatherAll(engine, model, StateClass::kMaster);
                if (all.ok() && trainer.rank() == 0) masters = *std::move(all);
                return all.status();
              });
      };
      ParameterValues clean;
      train(/*skipped_step=*/1'000'000, 0, clean);
      ASSERT_FALSE(clean.empty());
      for (const float value : kNotNumbers) {
        SCOPED_TRACE(::testing::Message()
                     << setting << ", " << std::string(Name(dtype)) << ", " << value);
        ParameterValues masters;
        train(/*skipped_step=*/1, value, masters);
        EXPECT_EQ(masters, clean);
      }
    }
  }
}

// Late, nothing has been updated and the engine goes on; early, it has failed.
TEST_P(OverflowTest, IsAnErrorThatNamesUnitAndRankIfChecksAreOff) {
  const ModelSpec model = ScriptedModel();
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(::testing::Message() << setting << ", " << std::string(Name(dtype)));
      Config config = ConfigFor(setting);
      config.compute = dtype;
      config.ebb.check_overflow = false;
      const bool early = setting.timing == Timing::kEarly;
      const std::string named = " has a non-finite gradient in unit 'u3'" +
                                (early ? "" : ", parameter '" + model.parameters[5].name + "'");
      RunOn(setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        const absl::StatusOr<ParameterValues> before =
            GatherAll(engine, model, StateClass::kMaster);
        trainer.BeginStep(0, nullptr);
        Step step = engine.BeginStep();
        RoundWith(trainer, step, kNotNumbers[0], culprit());
        const absl::Status wrong = FinishAndReport(engine, step);
        EXPECT_THAT(wrong, Says("rank ", named, "ebb.check_overflow"));
        EXPECT_EQ(engine.Report().status(), wrong);
        const absl::StatusOr<ParameterValues> after = GatherAll(engine, model, StateClass::kMaster);
        EXPECT_EQ(after.ok(), !early);
        EXPECT_EQ(wrong.message().find("the engine has failed") != absl::string_view::npos, early);
        if (after.ok()) {
          EXPECT_EQ(*before, *after);
        }
        Step next = engine.BeginStep();
        trainer.Round(next);
        const absl::Status finished = FinishAndReport(engine, next);
        EXPECT_EQ(finished, early ? wrong : absl::OkStatus());
      });
    }
  }
}

// A wrong gradient makes all units wrong that come behind it in backward.
TEST_P(OverflowTest, TheFirstUnitInBackwardIsNamed) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(GetParam());
  config.ebb.check_overflow = false;
  RunOn(GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    trainer.BeginStep(0, nullptr);
    Step step = engine.BeginStep();
    trainer.ForwardAll(step);
    for (int visit = kScriptedVisits; visit-- > 0;) {
      const UnitId unit{kScriptedUnits[visit]};
      BackwardScope scope = step.Backward(unit);
      trainer.Add(scope, visit);
      if (visit > 3) continue;
      for (const ParameterId p : model[unit].parameters) {
        if (!model[p].trainable) continue;
        const std::vector<float> values(static_cast<size_t>(Elements(model[p].shape)),
                                        kNotNumbers[0]);
        AddTo(scope.gradient(p), values);
      }
    }
    EXPECT_THAT(FinishAndReport(engine, step),
                Says("non-finite gradient in unit 'u3', parameter '"));
  });
}

// The loss is only reported: what counts is whether the gradients are numbers.
TEST_P(OverflowTest, ANaNLossIsReported) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam(), model, ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
          for (int number = 0; number < 3; ++number) {
            trainer.BeginStep(number, nullptr);
            Step step = engine.BeginStep();
            trainer.Round(step);
            const float loss = trainer.rank() == culprit() && number == 1 ? kNotNumbers[0] : 1.0f;
            step.AddLoss({.data = &loss});
            if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
            const absl::StatusOr<StepReport> report = engine.Report();
            if (!report.ok()) return report.status();
            EXPECT_EQ(std::isnan(report->loss), number == 1);
            EXPECT_TRUE(report->applied);
          }
          return absl::OkStatus();
        });
}

const absl::Status kOwn = absl::InvalidArgumentError("own"), kOther = absl::AbortedError("other"),
                   kFailure = absl::DataLossError("failure");

// FinishOptions::error.
TEST(TrainersOwnErrorTest, OfOneRankEndsTheStepOnEveryRankAndTheNextStepTrains) {
  const Setting setting{.world = 3, .stage = 2};
  const ModelSpec model = ScriptedModel();
  RunOn(setting, model, ConfigFor(setting),
        [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
          for (const bool fails : {true, false}) {
            trainer.BeginStep(0, nullptr);
            Step step = engine.BeginStep();
            RoundWith(trainer, step, 0, /*culprit=*/0);
            FinishOptions options;
            if (fails && trainer.rank() == 1) options.error = kOwn;
            step.Finish(options).IgnoreError();  // of this rank
            const absl::StatusOr<StepReport> report = engine.Report();
            EXPECT_EQ(report.ok(), !fails) << report.status();
            if (!fails) return report.status();
            EXPECT_EQ(report.status().code(), kOwn.code());
            EXPECT_EQ(report.status().message(), trainer.rank() == 1 ? "own" : "rank 1: own");
          }
          return absl::OkStatus();
        });
}

TEST(StepErrorsTest, TheFirstFailureIsTheCause) {
  StepErrors errors;
  EXPECT_FALSE(errors.has_failed());
  EXPECT_OK(errors.Report());
  errors.Fail(absl::OkStatus());
  EXPECT_FALSE(errors.has_failed());
  errors.Fail(kFailure);
  errors.Fail(absl::InternalError("in its wake"));
  EXPECT_TRUE(errors.has_failed());
  EXPECT_EQ(errors.failure(), kFailure);
  EXPECT_EQ(errors.Report(), kFailure);
  EXPECT_EQ(errors.Report(), kFailure) << "every call returns it";
}

TEST(StepErrorsTest, AFailureIsUnreportedUntilACallReturnsIt) {
  StepErrors errors;
  EXPECT_OK(errors.Report());
  EXPECT_OK(errors.UnreportedFailure());
  errors.Fail(kFailure);
  EXPECT_EQ(errors.UnreportedFailure(), kFailure);
  EXPECT_EQ(errors.Peek(), kFailure);
  EXPECT_EQ(errors.UnreportedFailure(), kFailure) << "Peek does not report";
  EXPECT_EQ(errors.Report(), kFailure);
  EXPECT_OK(errors.UnreportedFailure());
}

TEST(StepErrorsTest, TheFirstErrorOfAStepSticksAndEndsWithIt) {
  StepErrors errors;
  errors.Note(kOther);
  EXPECT_TRUE(errors.Peek().ok()) << "no step is open";
  errors.Open(1);
  EXPECT_FALSE(errors.blocked(1));
  errors.Note(absl::OkStatus());
  EXPECT_FALSE(errors.blocked(1));
  errors.Note(kOwn);
  errors.Note(kOther);
  EXPECT_TRUE(errors.blocked(1));
  EXPECT_FALSE(errors.blocked(0));
  EXPECT_EQ(errors.Peek(), kOwn);
  EXPECT_EQ(errors.Report(), kOwn);
  EXPECT_EQ(errors.Report(), kOwn) << "as by Reduce and by Finish";
  errors.Close();
  EXPECT_OK(errors.Report());
  EXPECT_TRUE(errors.blocked(1)) << "its early updates may still be in the queue";
  errors.Open(1);
  EXPECT_FALSE(errors.blocked(1));
  EXPECT_OK(errors.Peek());
}

TEST(StepErrorsTest, AnEvaluationBlocksNoUpdate) {
  StepErrors errors;
  errors.Open(StepErrors::kEvaluation);
  errors.Note(kOwn);
  EXPECT_FALSE(errors.blocked(0));
  EXPECT_FALSE(errors.blocked(1));
  EXPECT_EQ(errors.Report(), kOwn);
}

TEST(StepErrorsTest, TheErrorOfAStepWithAVerdictIsReturnedOnceAndFailsEveryStepUntilThen) {
  StepErrors errors;
  const int64_t first = errors.NextExchange(), second = errors.NextExchange();
  EXPECT_EQ(second, first + 1);
  errors.NoteJudged(kOther, first);
  errors.NoteJudged(kOwn, second);
  EXPECT_TRUE(errors.has_unreported());
  EXPECT_EQ(errors.Peek(), kOther) << "the oldest";
  EXPECT_LT(errors.known_exchange(), first);
  errors.Open(0);
  EXPECT_TRUE(errors.blocked(0));
  EXPECT_EQ(errors.Report(), kOther);
  EXPECT_FALSE(errors.has_unreported());
  EXPECT_EQ(errors.known_exchange(), second) << "with all that was exchanged by then";
  EXPECT_EQ(errors.Report(), kOther) << "the error of the step that is open";
  errors.Close();
  EXPECT_OK(errors.Report());
  errors.NoteJudged(kOwn, second);
  EXPECT_TRUE(errors.Report().ok()) << "the caller knows";
}

TEST(StepErrorsTest, AnErrorReceivedWithinAStepIsAlsoTheErrorOfTheStep) {
  StepErrors errors;
  const int64_t exchange = errors.NextExchange();
  errors.Open(0);
  errors.NoteJudged(kOther, exchange);
  EXPECT_TRUE(errors.blocked(0));
  EXPECT_EQ(errors.Report(), kOther);
  EXPECT_EQ(errors.Report(), kOther);
}

TEST(StepErrorsTest, AnErrorKnownBeforeAFailureIsReturnedBeforeIt) {
  StepErrors errors;
  errors.NoteJudged(kOther, errors.NextExchange());
  errors.Fail(kFailure);
  EXPECT_EQ(errors.Report(), kOther);
  EXPECT_EQ(errors.UnreportedFailure(), kFailure);
  EXPECT_EQ(errors.Report(), kFailure);
  EXPECT_OK(errors.UnreportedFailure());
}

TEST(StepErrorsTest, OneOfManyThreadsFailsFirst) {
  StepErrors errors;
  constexpr int kThreads = 8;
  std::vector<std::thread> threads;
  std::vector<absl::Status> seen(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      errors.Fail(absl::AbortedError(std::to_string(i)));
      seen[static_cast<size_t>(i)] = errors.Peek();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : seen) EXPECT_EQ(status, errors.failure());
}

// Trails of two ranks name the first scope in which their logs differ.

constexpr int kDeclared = 12;

// The engine's trail with a declared order 0 1 2 ...: after a scope the next one is expected, or
// the one that was expected anyway.
ScopeTrail TrailOf(const std::vector<int>& codes) {
  ScopeTrail trail{.next = 0};
  int next = 0;
  const auto code = [](int scope) { return scope < kDeclared ? scope : ScopeTrail::kNothing; };
  for (int opened : codes) {
    const int expected = next;
    next = std::max(next, opened + 1);
    trail.Open(opened, code(expected), code(next));
  }
  return trail;
}

std::vector<int> RandomCodes(sharding::Random& random, int off_plan_in_ten) {
  std::vector<int> codes;
  for (int64_t left = random.Between(0, kDeclared); left > 0; --left) {
    const int next = codes.empty() ? 0 : codes.back() + 1;
    codes.push_back(random.Between(0, 9) < off_plan_in_ten
                        ? static_cast<int>(random.Between(0, kDeclared - 1))
                        : std::min(next, kDeclared - 1));
  }
  return codes;
}

TEST(ScopeTrailTest, NamesTheFirstDifferenceOfLogs) {
  int differ = 0;
  for (uint64_t seed = 1; seed <= 20'000; ++seed) {
    sharding::Random random(seed);
    const std::vector<int> first = RandomCodes(random, static_cast<int>(seed % 4));
    std::vector<int> other = first;
    if (random.Between(0, 3) > 0) other = RandomCodes(random, static_cast<int>(seed % 4));
    size_t at = 0;
    while (at < first.size() && at < other.size() && first[at] == other[at]) ++at;
    const auto difference = FirstDifference(TrailOf(first), TrailOf(other));
    ASSERT_EQ(difference.has_value(), first != other) << "seed " << seed;
    if (!difference) continue;
    ++differ;
    const auto code = [at](const std::vector<int>& codes) {
      return at < codes.size() ? codes[at] : ScopeTrail::kNothing;
    };
    ASSERT_EQ(difference->number, static_cast<int>(at)) << "seed " << seed;
    ASSERT_EQ(difference->first, code(first)) << "seed " << seed;
    ASSERT_EQ(difference->other, code(other)) << "seed " << seed;
  }
  EXPECT_GT(differ, 1'000);
}

TEST(ScopeTrailTest, SeesNoDifferenceInScopesThatItHasNotKept) {
  std::vector<int> first(ScopeTrail::kOffPlanMax + 3, 0), other = first;
  first.push_back(5);
  other.push_back(6);
  EXPECT_FALSE(FirstDifference(TrailOf(first), TrailOf(other)).has_value());
  other[7] = 3;  // but it has the ones before
  const auto difference = FirstDifference(TrailOf(first), TrailOf(other));
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(difference->number, 7);
  EXPECT_EQ(difference->first, 0);
  EXPECT_EQ(difference->other, 3);
}

}  // namespace
}  // namespace ebb::testing::step_errors_test
