// A step's inputs (StepOptions, hold_updates) and outputs (StepReport, Read of gradients, the
// communication it took): exact numbers, because the scripted gradients are exact.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing::step_report_test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class StepReportTest : public ::testing::TestWithParam<Setting> {
 protected:
  // This rank's gradients between Reduce and Finish are the sums over `divisor`.
  void ExpectGradients(Engine& engine, int64_t step, int micro_batches, double divisor) const {
    ASSERT_OK_AND_ASSIGN(const auto slices, ReadSlices(engine, model_, StateClass::kGradient));
    ParameterValues expected = GradientSums(model_, GetParam().world, step, micro_batches);
    for (size_t p = 0; p < expected.size(); ++p) {
      for (size_t i = 0; i < expected[p].size(); ++i) {
        const float value = slices[p][i];
        if (std::isnan(value)) continue;  // another rank's
        ASSERT_TRUE(model_.parameters[p].trainable);
        ASSERT_EQ(value, expected[p][i] / static_cast<float>(divisor))
            << model_.parameters[p].name << " " << i;
        ++compared_;
      }
    }
  }
  ModelSpec model_ = ScriptedModel();
  mutable std::atomic<int64_t> compared_{0};
};
INSTANTIATE_TEST_SUITE_P(Cells, StepReportTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 0})), NameOf);

constexpr int64_t kTrainableElements = 99 + 7 + 130 + 130 + 300 + 1;

TEST_P(StepReportTest, HeldGradientsAreTheSumsOverTheDivisor) {
  Config config = ConfigFor(GetParam());
  config.gradient_accumulation_steps = 2;
  // Also of other numbers of micro-batches than the config's.
  constexpr int kMicroBatches[] = {0, 1, 2, 4};
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    for (int number = 0; number < 4; ++number) {
      const int asked = kMicroBatches[number], actual = asked == 0 ? 2 : asked;
      trainer.BeginStep(number, nullptr);
      const auto refused = ReadSlices(engine, model_, StateClass::kGradient).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
      Step step =
          engine.BeginStep({.micro_batches = asked, .gradient_divisor = 8, .hold_updates = true});
      EXPECT_EQ(step.rounds(), actual);
      EXPECT_FALSE(ReadSlices(engine, model_, StateClass::kGradient).ok());
      for (int round = 0; round < step.rounds(); ++round) trainer.Round(step);
      EXPECT_FALSE(ReadSlices(engine, model_, StateClass::kGradient).ok());
      ASSERT_OK(step.Reduce());
      ExpectGradients(engine, number, actual, /*divisor=*/8);
      ASSERT_OK(step.Finish());
      EXPECT_FALSE(ReadSlices(engine, model_, StateClass::kGradient).ok());
    }
  });
  EXPECT_EQ(compared_, 4 * kTrainableElements);
}

TEST_P(StepReportTest, ReduceNeedsHeldUpdatesAndABackward) {
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    RunOn(setting, model_, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
      const auto before = GatherAll(engine, model_, StateClass::kMaster);
      {
        Step step = engine.BeginStep();
        trainer.Round(step);
        const absl::Status reduced = step.Reduce();
        EXPECT_THAT(reduced,
                    StatusIs(absl::StatusCode::kFailedPrecondition, "StepOptions::hold_updates"));
        EXPECT_EQ(FinishAndReport(engine, step).code(), reduced.code());
      }
      Step step = engine.BeginStep({.hold_updates = true});
      trainer.ForwardAll(step);
      const absl::Status reduced = step.Reduce();
      EXPECT_THAT(reduced, StatusIs(absl::StatusCode::kFailedPrecondition, "before any Backward"));
      EXPECT_EQ(FinishAndReport(engine, step).code(), reduced.code());
      EXPECT_EQ(*GatherAll(engine, model_, StateClass::kMaster), *before);
      ASSERT_OK(TrainStep(engine, trainer, 1));
    });
  }
}

struct WrongOptions {
  StepOptions options;
  const char* message;
};
TEST_P(StepReportTest, WrongOptionsAreRefusedAndLeaveNothing) {
  const WrongOptions wrongs[] = {
      {{.micro_batches = -2}, "multiple of ebb.micro_batches_per_round, 2"},
      {{.micro_batches = 3}, "a step of 3 micro-batches"},
      {{.gradient_divisor = -1}, "gradient_divisor -1"},
      {{.gradient_divisor = kNaN}, "gradient_divisor nan"},
      {{.gradient_divisor = kInfinity}, "gradient_divisor inf"},
      {{.gradient_divisor = 1e50}, "gradient_divisor 1e+50"},
      {{.gradient_divisor = 1e-60}, "gradient_divisor 1e-60"},
      {{.learning_rate = 1e39}, "learning_rate 1e+39"},
      {{.micro_batches = 2'147'483'646}, "rounds; at most"},
      {{.learning_rate = -0.1}, "learning_rate -0.1"},
      {{.learning_rate = kNaN}, "learning_rate nan"},
      {{.learning_rate = kInfinity}, "learning_rate inf"},
  };
  for (const Setting& setting : At(GetParam(), kTimings)) {
    Config config = ConfigFor(setting);
    config.gradient_accumulation_steps = 4;
    config.ebb.micro_batches_per_round = 2;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      ASSERT_OK(TrainStep(engine, trainer, 0));
      ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model_));
      for (const WrongOptions& wrong : wrongs) {
        const absl::Status status = TrainStep(engine, trainer, 1, wrong.options);
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, wrong.message));
        ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model_));
        EXPECT_EQ(after, before) << wrong.message;
      }
      ASSERT_OK(TrainStep(engine, trainer, 1));
    });
  }
}

// Plain SGD: by powers of two the new master is exact.
TEST_P(StepReportTest, RateAndDivisorOfAStepReplaceTheDefaults) {
  struct Case {
    StepOptions options;
    float rate, divisor;
  };
  const float world = static_cast<float>(GetParam().world);
  const Case cases[] = {
      {{}, 0.25f, world},
      {{.gradient_divisor = 16}, 0.25f, 16},
      {{.learning_rate = 2}, 2, world},
      {{.gradient_divisor = 2, .learning_rate = 0.125}, 0.125f, 2},
      {{.learning_rate = 0}, 0, world},
  };
  for (const Setting& setting : At(GetParam(), kTimings)) {
    Config config = ConfigFor(setting);
    config.gradient_clipping = 0;
    config.optimizer = {.type = OptimizerType::kSgd, .learning_rate = 0.25};
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      int64_t number = 0;
      for (const Case& one : cases) {
        ASSERT_OK_AND_ASSIGN(ParameterValues masters,
                             GatherAll(engine, model_, StateClass::kMaster));
        ASSERT_OK(TrainStep(engine, trainer, number, one.options));
        const ParameterValues sums = GradientSums(model_, setting.world, number++);
        ASSERT_OK_AND_ASSIGN(const ParameterValues updated,
                             GatherAll(engine, model_, StateClass::kMaster));
        float apart = 0;
        for (size_t p = 0; p < masters.size(); ++p) {
          for (size_t i = 0; i < masters[p].size(); ++i) {
            const float gradient = sums[p][i] / one.divisor;
            const float expected = std::fma(-one.rate, gradient, masters[p][i]);
            apart = std::max(apart, std::abs(updated[p][i] - expected));
          }
        }
        // Thirds are rounded, once for each visit and again in the sum: of values below 8, in fp32.
        EXPECT_LE(apart, one.divisor == 3 ? 4 * 0x1p-21f : 0) << setting;
        ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
        EXPECT_EQ(report.learning_rate, one.rate);
      }
    });
  }
}

// Left out everywhere: its gradient is zero, and plain SGD leaves it as it is.
TEST_P(StepReportTest, AUnitLeftOutHasZeroGradients) {
  Config config = ConfigFor(GetParam());
  config.optimizer = {.type = OptimizerType::kSgd, .learning_rate = 0.25};
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK_AND_ASSIGN(const ParameterValues before,
                         GatherAll(engine, model_, StateClass::kMaster));
    Step step = engine.BeginStep({.may_leave_out = true});
    for (int unit : {0, 1, 2, 4, 0}) trainer.Forward(step, unit);
    for (int visit : {5, 4, 2, 1, 0}) trainer.Backward(step, visit);
    ASSERT_OK(step.Finish());
    ASSERT_OK_AND_ASSIGN(const ParameterValues after,
                         GatherAll(engine, model_, StateClass::kMaster));
    for (size_t p = 0; p < before.size(); ++p) {
      const ParameterSpec& parameter = model_.parameters[p];
      EXPECT_EQ(after[p] == before[p], parameter.name == "w3" || !parameter.trainable)
          << parameter.name;
    }
  });
}

TEST_P(StepReportTest, ReportsTheStepThatFinishedLast) {
  const int world = GetParam().world;
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    Config config = ConfigFor(setting);
    config.compute = DType::kFloat16;
    config.communication = DType::kFloat32;  // the sums stay exact
    config.loss_scale = {.initial_scale_power = 3, .window = 1, .hysteresis = 1};
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      EXPECT_EQ(engine.Report().status().code(), absl::StatusCode::kFailedPrecondition);
      // DeepSpeed's rule with a window of 1: the second clean step in a row doubles it.
      const double scales[] = {8, 8, 16, 8};
      for (int number = 0; number < 4; ++number) {
        const bool overflows = number == 2;
        ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model_));
        trainer.BeginStep(number, nullptr);
        Step step = engine.BeginStep(kExactStep);
        EXPECT_EQ(step.loss_scale(), scales[number]);
        EXPECT_EQ(step.device_loss_scale().as<float>()[0], step.loss_scale());
        for (int call = 0; call < 2; ++call) {
          const float loss = static_cast<float>(trainer.rank() + number + call);
          step.AddLoss({.data = &loss});
        }
        trainer.ForwardAll(step);
        for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
          BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
          trainer.Add(scope, visit);
          if (overflows && visit == 3 && trainer.rank() == world - 1)
            scope.gradient(ParameterId{5}).as<float>()[3] = static_cast<float>(kInfinity);
        }
        ASSERT_OK(step.Finish());
        ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
        EXPECT_EQ(report.step, number + 1);
        EXPECT_EQ(report.applied, !overflows);
        EXPECT_EQ(report.skipped_steps, number < 2 ? 0 : 1);
        EXPECT_EQ(report.loss, (world * (2 * number + 1) + world * (world - 1)) / 4.0);
        EXPECT_EQ(report.loss_scale, scales[number]);
        EXPECT_EQ(report.learning_rate, 0.01);
        double squares = 0;
        for (const std::vector<float>& sums : GradientSums(model_, world, number)) {
          for (const double sum : sums) squares += sum * sum;
        }
        const double norm = std::sqrt(squares) / 4 / scales[number];
        if (overflows) {
          EXPECT_FALSE(std::isfinite(report.gradient_norm));
        } else {  // fp64 sums of exact fp32 values
          EXPECT_NEAR(report.gradient_norm, norm, 1e-12 * norm);
        }
        ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model_));
        EXPECT_EQ(after == before, overflows);
      }
    });
  }
}

// Also where ranks exchange norms of parameters.
TEST_P(StepReportTest, CommunicationEqualsThePlans) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    Config config = ConfigFor(setting);
    config.gradient_accumulation_steps = 2;
    if (setting.timing == Timing::kLate) config.optimizer.type = OptimizerType::kLamb;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      const auto expect = [&](const char* when) {
        uint64_t total = 0;
        for (const CommunicationRow& row : engine.communication()) {
          EXPECT_EQ(row.bytes, row.predicted_bytes) << row.operation << ", " << setting << when;
          if (row.operation == "gather_gradient") {
            EXPECT_EQ(row.bytes > 0, setting.stage == 0 && setting.world > 1);
          }
          total += row.bytes;
        }
        EXPECT_EQ(total > 0, setting.world > 1);
      };
      for (int number = 0; number < 3; ++number) {
        ASSERT_OK(TrainStep(engine, trainer, number));
        expect(" after it");
        // The report has neither the calls in between nor the open step.
        Evaluation evaluation = engine.BeginEvaluation();
        for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
        ASSERT_OK(evaluation.Finish().status());
        expect(" after an evaluation");
        StepOptions options = kExactStep;
        options.hold_updates = true;
        Step dropped = engine.BeginStep(options);
        trainer.Round(dropped);
        expect(" in the next");
      }
    });
  }
}

}  // namespace
}  // namespace ebb::testing::step_report_test
