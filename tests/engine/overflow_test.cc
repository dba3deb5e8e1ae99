// Gradients and losses that are not finite. The step is skipped on every rank and counted. If
// overflow checks are off, it is an error that names the first such gradient.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::overflow_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
INSTANTIATE_TEST_SUITE_P(Cells, OverflowTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

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
        const absl::Status status = RunEngines(
            setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
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
        EXPECT_TRUE(status.ok()) << status;
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
      const std::string named =
          "non-finite gradient in unit 'u3'" +
          (early ? "" : ", parameter '" + model.parameters[5].name + "', of rank ");
      const absl::Status status = RunEngines(
          setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            const absl::StatusOr<ParameterValues> before =
                GatherAll(engine, model, StateClass::kMaster);
            trainer.BeginStep(0, nullptr);
            Step step = engine.BeginStep();
            RoundWith(trainer, step, kNotNumbers[0], culprit());
            const absl::Status wrong = FinishAndReport(engine, step);
            EXPECT_THAT(std::string(wrong.message()), AllOf(HasSubstr(named), HasSubstr("of rank "),
                                                            HasSubstr("ebb.check_overflow")));
            EXPECT_EQ(engine.Report().status(), wrong);
            const absl::StatusOr<ParameterValues> after =
                GatherAll(engine, model, StateClass::kMaster);
            EXPECT_EQ(after.ok(), !early);
            EXPECT_EQ(wrong.message().find("the engine has failed") != absl::string_view::npos,
                      early);
            if (after.ok()) {
              EXPECT_EQ(*before, *after);
            }
            Step next = engine.BeginStep();
            trainer.Round(next);
            const absl::Status finished = FinishAndReport(engine, next);
            EXPECT_EQ(finished, early ? wrong : absl::OkStatus());
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// What is wrong in backward is wrong in all units that come behind it.
TEST_P(OverflowTest, TheFirstUnitInBackwardIsNamed) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(GetParam());
  config.ebb.check_overflow = false;
  const absl::Status status = RunEngines(
      GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
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
        EXPECT_THAT(std::string(FinishAndReport(engine, step).message()),
                    HasSubstr("non-finite gradient in unit 'u3', parameter '"));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// The loss is only reported: what counts is whether the gradients are numbers.
TEST_P(OverflowTest, ANaNLossIsReported) {
  const ModelSpec model = ScriptedModel();
  const absl::Status status = RunEngines(
      GetParam(), model, ConfigFor(GetParam()),
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
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::testing::overflow_test
