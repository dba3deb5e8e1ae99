// Learning rates, weight decays and a scale of the gradient that a trainer gives for one step, at
// its begin or its end: the bits of a config with these values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing::step_rates_test {
namespace {

constexpr int kSteps = 3;
constexpr double kRate = 0.03, kDecay = 0.25, kUngrouped = 0.002;

ModelSpec ModelWithGroup() {
  ModelSpec model = ScriptedModel();
  for (ParameterSpec& parameter : model.parameters)
    if (parameter.name == "w1" || parameter.name == "w3") parameter.group = "some";
  return model;
}

Config ConfigWithGroup(const Setting& setting) {
  Config config = ConfigFor(setting);
  config.ebb.parameter_groups["some"] = {.lr_factor = 7};
  return config;
}

const std::vector<GroupRates> kRates = {
    {.group = "some", .learning_rate = kRate, .weight_decay = kDecay},
    {.learning_rate = kUngrouped}};

struct Given {
  StepOptions begin = {.gradient_divisor = 4};
  FinishOptions finish = {};
};

class StepRatesTest : public ::testing::TestWithParam<Setting> {
 protected:
  struct Result {
    Snapshot state;
    StepReport report;
  };
  // The last rank's result.
  Result Train(const Setting& setting, const Config& config, const Given& given) {
    Result result;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      for (int number = 0; number < kSteps; ++number) {
        trainer.BeginStep(number, nullptr);
        Step step = engine.BeginStep(given.begin);
        const float loss = 3;
        step.AddLoss({.data = &loss});
        trainer.Round(step);
        ASSERT_OK(step.Finish(given.finish));
      }
      ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
      ASSERT_OK_AND_ASSIGN(Snapshot state, TakeSnapshot(engine, model_));
      if (trainer.rank() + 1 == setting.world) result = {std::move(state), report};
    });
    return result;
  }

  // The error of a step with wrong values, from Finish or from Report, on this rank.
  absl::Status Refused(Engine& engine, ScriptedTrainer& trainer, const Given& given) {
    Step step = engine.BeginStep(given.begin);
    trainer.Round(step);
    return Reported(engine, step.Finish(given.finish));
  }

  const ModelSpec model_ = ModelWithGroup();
};
INSTANTIATE_TEST_SUITE_P(Cells, StepRatesTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 1, .stage = 0})), NameOf);

TEST_P(StepRatesTest, HaveTheBitsOfAConfigThatSaysTheSame) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    Config same = ConfigWithGroup(setting);
    OptimizerConfig of_group = same.optimizer;
    of_group.learning_rate = kRate;
    of_group.weight_decay = kDecay;
    same.ebb.parameter_groups["some"] = {.optimizer = of_group};
    same.optimizer.learning_rate = kUngrouped;
    const Result expected = Train(setting, same, {});
    EXPECT_EQ(expected.report.learning_rate, kUngrouped);
    const Config config = ConfigWithGroup(setting);
    EXPECT_NE(Train(setting, config, {}).state, expected.state) << "it makes a difference";
    const Given at_begin = {.begin = {.gradient_divisor = 4, .rates = kRates}};
    const Given at_finish = {.begin = {.gradient_divisor = 4, .rates_at_finish = true},
                             .finish = {.rates = kRates}};
    const Given in_both = {
        .begin = {.gradient_divisor = 4,
                  .rates = {{.group = "some", .learning_rate = 9, .weight_decay = kDecay}},
                  .rates_at_finish = true},
        .finish = {
            .rates = {{.group = "some", .learning_rate = kRate}, {.learning_rate = kUngrouped}}}};
    for (const Given& given : {at_begin, at_finish, in_both}) {
      const Result actual = Train(setting, config, given);
      EXPECT_EQ(actual.state, expected.state) << setting;
      EXPECT_EQ(actual.report.learning_rate, kUngrouped);
    }
  }
}

TEST_P(StepRatesTest, AreOfTheirStepAlone) {
  const Config config = ConfigWithGroup(GetParam());
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    for (int number = 0; number < 4; ++number) {
      Step step = engine.BeginStep({.gradient_divisor = 4});
      trainer.Round(step);
      ASSERT_OK(step.Finish({.rates = number == 1 ? kRates : std::vector<GroupRates>()}));
      ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
      EXPECT_EQ(report.learning_rate, number == 1 ? kUngrouped : config.optimizer.learning_rate);
    }
  });
}

// Powers of two, so that no bit is lost on either way.
TEST_P(StepRatesTest, AGradientScaleIsAnotherDivisor) {
  for (const double clipping : {0.0, 0.125}) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      Config config = ConfigWithGroup(setting);
      config.gradient_clipping = setting.timing == Timing::kEarly ? 0 : clipping;
      const Result expected = Train(setting, config, {.begin = {.gradient_divisor = 16}});
      const Result actual = Train(setting, config,
                                  {.begin = {.gradient_divisor = 4, .rates_at_finish = true},
                                   .finish = {.gradient_scale = 0.25}});
      EXPECT_EQ(actual.state, expected.state) << setting << ", clipping " << clipping;
      EXPECT_EQ(actual.report.gradient_norm, expected.report.gradient_norm);
      EXPECT_EQ(actual.report.loss, expected.report.loss);
    }
  }
}

TEST_P(StepRatesTest, WithEarlyUpdatesAValueAtFinishIsAnErrorWithARemedy) {
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  for (const FinishOptions& finish :
       {FinishOptions{.rates = kRates}, FinishOptions{.gradient_scale = 0.5}}) {
    RunOn(setting, model_, ConfigWithGroup(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
      EXPECT_THAT(Refused(engine, trainer, {.finish = finish}),
                  Says("updates are early", "StepOptions::rates_at_finish"));
    });
  }
}

TEST_P(StepRatesTest, WrongValuesAreRefusedAndLeaveNothing) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  struct Wrong {
    Given given;
    const char* says;
  };
  const Wrong wrongs[] = {
      {{.begin = {.rates = {{.group = "other", .learning_rate = 1}}}}, "group 'other', which"},
      {{.finish = {.rates = {{.group = "other", .learning_rate = 1}}}}, "group 'other', which"},
      {{.begin = {.rates = {{.group = "some", .learning_rate = -1}}}},
       "learning_rate -1 for group 'some'"},
      {{.finish = {.rates = {{.weight_decay = kNaN}}}},
       "weight_decay nan for the parameters of no group"},
      {{.finish = {.rates = {{.learning_rate = 1e39}}}}, "learning_rate 1e+39"},
      {{.finish = {.gradient_scale = 0}}, "gradient_scale 0"},
      {{.finish = {.gradient_scale = -2}}, "gradient_scale -2"},
      {{.finish = {.gradient_scale = 1e50}}, "gradient_scale 1e+50"},
      {{.finish = {.gradient_scale = kNaN}}, "gradient_scale nan"},
  };
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    RunOn(setting, model_, ConfigWithGroup(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
      ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model_));
      for (const Wrong& wrong : wrongs) {
        const absl::Status status = Refused(engine, trainer, wrong.given);
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, wrong.says));
      }
      ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model_));
      EXPECT_EQ(before, after);
      ASSERT_OK(TrainStep(engine, trainer, 0));
    });
  }
}

TEST_P(StepRatesTest, RanksThatDifferAreAnErrorThatNamesOne) {
  if (GetParam().world == 1) GTEST_SKIP() << "it has no others";
  const std::vector<GroupRates> other = {{.group = "some", .weight_decay = 0.5}};
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    for (const Given& odd :
         {Given{.begin = {.gradient_divisor = 4, .rates = other}},
          Given{.finish = {.rates = other}}, Given{.finish = {.gradient_scale = 0.5}}}) {
      RunOn(setting, model_, ConfigWithGroup(setting),
            [&](Engine& engine, ScriptedTrainer& trainer) {
              ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model_));
              const absl::Status status =
                  Refused(engine, trainer, trainer.rank() == 1 ? odd : Given{});
              EXPECT_THAT(status, Says("different learning rates or weight decays of groups",
                                       "gradient_scale", "rank 1 differs from rank 0"));
              ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model_));
              EXPECT_EQ(before, after);
              ASSERT_OK(TrainStep(engine, trainer, 0));
            });
    }
  }
}

TEST_P(StepRatesTest, AnOptimizerOfTheTrainersHasTheRatesAndItsOwnDecay) {
  std::mutex mutex;
  std::set<double> of_group, of_others;
  const OptimizerSpec spec{.update = [&](const UpdateSlice& update) {
    const std::lock_guard lock(mutex);
    (update.group == "some" ? of_group : of_others).insert(update.learning_rate);
    return absl::OkStatus();
  }};
  Config config = ConfigWithGroup(GetParam());
  RunOn(GetParam(), model_, config,
        [&](Engine& engine, ScriptedTrainer& trainer) {
          Step step = engine.BeginStep();
          trainer.Round(step);
          ASSERT_OK(step.Finish({.rates = {{.group = "some", .learning_rate = kRate},
                                           {.learning_rate = kUngrouped}}}));
          ASSERT_OK(TakeSnapshot(engine, model_, {}).status());
          EXPECT_THAT(Refused(engine, trainer, {.finish = {.rates = kRates}}),
                      Says("EngineOptions::optimizer it is that optimizer's own"));
        },
        {.optimizer = spec});
  const std::lock_guard lock(mutex);
  EXPECT_EQ(of_group, std::set<double>{kRate});
  EXPECT_EQ(of_others, std::set<double>{kUngrouped});
}

}  // namespace
}  // namespace ebb::testing::step_rates_test
