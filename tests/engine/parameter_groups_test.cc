// What an engine does for each parameter group by itself: its learning rate under a schedule, and
// the names of its optimizer's states.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ebb/optim/schedule.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing::parameter_groups_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr double kRate = 0.25, kOwnRate = 0.0625, kFactor = 0.5;

// "w1" is in a group with its own optimizer, "w4" in one with a factor.
ModelSpec GroupedModel() {
  ModelSpec model = ScriptedModel();
  for (ParameterSpec& parameter : model.parameters) {
    if (parameter.name == "w1") parameter.group = "own";
    if (parameter.name == "w4") parameter.group = "factor";
  }
  return model;
}

class ParameterGroupsTest : public ::testing::TestWithParam<Setting> {
 protected:
  ModelSpec model_ = GroupedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, ParameterGroupsTest, ::testing::ValuesIn(WorldsAndStages({2})),
                         NameOf);

struct Schedule {
  const char* name;
  SchedulerConfig scheduler;
  bool replaces = false;  // the group's rate, as DeepSpeed's does
};
const Schedule kSchedules[] = {
    {"none", {}},
    {"WarmupLR", {.type = SchedulerType::kWarmup, .warmup_num_steps = 3, .warmup_log = false}},
    {"WarmupLR to a rate",
     {.type = SchedulerType::kWarmup, .warmup_max_lr = 0.5, .warmup_num_steps = 2},
     true},
    {"WarmupDecayLR",
     {.type = SchedulerType::kWarmupDecay,
      .warmup_max_lr = 0.5,
      .warmup_num_steps = 2,
      .total_num_steps = 9},
     true},
    {"WarmupCosineLR",
     {.type = SchedulerType::kWarmupCosine, .warmup_num_steps = 2, .total_num_steps = 5}},
    {"OneCycle",
     {.type = SchedulerType::kOneCycle,
      .cycle_min_lr = 0.125,
      .cycle_max_lr = 0.5,
      .cycle_first_step_size = 2},
     true},
    {"LRRangeTest",
     {.type = SchedulerType::kLrRangeTest,
      .lr_range_test_min_lr = 0.125,
      .lr_range_test_step_size = 2},
     true},
};

// Plain SGD with exact gradients: one rounding from the rate to the master.
TEST_P(ParameterGroupsTest, AScheduleScalesEachGroupsOwnRate) {
  for (const Schedule& schedule : kSchedules) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      SCOPED_TRACE(::testing::Message() << schedule.name << ", " << setting);
      Config config = ConfigFor(setting);
      config.gradient_clipping = 0;
      config.optimizer = {.type = OptimizerType::kSgd, .learning_rate = kRate};
      config.scheduler = schedule.scheduler;
      config.ebb.parameter_groups = {
          {"own",
           {.optimizer = OptimizerConfig{.type = OptimizerType::kSgd, .learning_rate = kOwnRate}}},
          {"factor", {.lr_factor = kFactor}}};
      RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (int64_t number = 0; number < 5; ++number) {
          EBB_ASSIGN_OR_RETURN(const ParameterValues before,
                               GatherAll(engine, model_, StateClass::kMaster));
          StepOptions options = kExactStep;
          if (number == 4) options.learning_rate = 0.03125;  // of all groups
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number, options));
          const ParameterValues sums = GradientSums(model_, setting.world, number);
          EBB_ASSIGN_OR_RETURN(const ParameterValues after,
                               GatherAll(engine, model_, StateClass::kMaster));
          const auto rate_of = [&](double base) {
            return options.learning_rate.value_or(
                optim::RatesAt(config.scheduler, base, number).learning_rate);
          };
          for (size_t p = 0; p < before.size(); ++p) {
            const std::string& group = model_.parameters[p].group;
            const double rate =
                rate_of(group == "own" ? kOwnRate : kRate) * (group == "factor" ? kFactor : 1);
            for (size_t i = 0; i < before[p].size(); ++i) {
              const float expected =
                  std::fma(static_cast<float>(-rate), sums[p][i] / 4, before[p][i]);
              EXPECT_EQ(after[p][i], expected)
                  << model_.parameters[p].name << " " << i << ", step " << number;
              if (after[p][i] != expected) break;
            }
          }
          EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
          EXPECT_EQ(report.learning_rate, rate_of(kRate));
        }
        return absl::OkStatus();
      });
    }
  }
  for (const Schedule& schedule : kSchedules) {
    const auto at = [&](double base) {
      return optim::RatesAt(schedule.scheduler, base, 3).learning_rate;
    };
    EXPECT_EQ(at(kOwnRate), schedule.replaces ? at(kRate) : at(kRate) * kOwnRate / kRate)
        << schedule.name;
  }
}

// Which parameters a state is shown of, with their whole elements on all ranks.
absl::StatusOr<std::set<std::string>> ParametersWith(Engine& engine, const std::string& state) {
  std::set<std::string> names;
  EBB_RETURN_IF_ERROR(engine.Read(
      StateClass::kOptimizer,
      [&](const Slice& slice, std::span<const float>) {
        names.insert(std::string(slice.name));
        return absl::OkStatus();
      },
      state));
  return names;
}

const OptimizerConfig kMomentum = {
    .type = OptimizerType::kSgd, .learning_rate = 0.25, .momentum = 0.5};

TEST_P(ParameterGroupsTest, StatesAreNamedByTheRuleOfTheirOwnGroup) {
  Config config = ConfigFor(GetParam());
  config.optimizer = kMomentum;
  config.ebb.parameter_groups = {{"own", {.optimizer = OptimizerConfig()}}};
  std::set<std::string> with_momentum, with_moments;
  std::mutex mutex;
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    for (const char* name : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
      EBB_ASSIGN_OR_RETURN(const std::set<std::string> here, ParametersWith(engine, name));
      const std::lock_guard<std::mutex> lock(mutex);
      (name[0] == 'm' ? with_momentum : with_moments).insert(here.begin(), here.end());
    }
    // Each name reaches its own array and no other's, which training goes on with.
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Constant(0.5f), "momentum_buffer"));
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Constant(0.25f), "exp_avg"));
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Constant(4), "exp_avg_sq"));
    for (const auto& [name, value] : std::vector<std::pair<const char*, float>>{
             {"momentum_buffer", 0.5f}, {"exp_avg", 0.25f}, {"exp_avg_sq", 4.0f}}) {
      EBB_RETURN_IF_ERROR(engine.Read(
          StateClass::kOptimizer,
          [&, value = value](const Slice&, std::span<const float> values) {
            for (const float each : values) EXPECT_EQ(each, value) << name;
            return absl::OkStatus();
          },
          name));
    }
    const absl::Status unknown = ParametersWith(engine, "velocity").status();
    EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(
        std::string(unknown.message()),
        AllOf(HasSubstr("no state 'velocity'"), HasSubstr("momentum_buffer, exp_avg, exp_avg_sq")));
    return absl::OkStatus();
  });
  EXPECT_THAT(with_momentum, UnorderedElementsAre("embedding", "norm", "w3", "w4", "b4"));
  EXPECT_THAT(with_moments, UnorderedElementsAre("w1"));
}

// Parameters of a group with an optimizer that keeps less are not shown with what others keep.
TEST_P(ParameterGroupsTest, AGroupThatKeepsNoStateHasNone) {
  Config config = ConfigFor(GetParam());
  config.ebb.parameter_groups = {
      {"own", {.optimizer = OptimizerConfig{.type = OptimizerType::kSgd}}},
      {"factor", {.optimizer = kMomentum}}};
  std::set<std::string> with_first, with_second;
  std::mutex mutex;
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer&) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const std::set<std::string> first, ParametersWith(engine, "exp_avg"));
    EBB_ASSIGN_OR_RETURN(const std::set<std::string> second, ParametersWith(engine, "exp_avg_sq"));
    const std::lock_guard<std::mutex> lock(mutex);
    with_first.insert(first.begin(), first.end());
    with_second.insert(second.begin(), second.end());
    return absl::OkStatus();
  });
  EXPECT_THAT(with_first, UnorderedElementsAre("embedding", "norm", "w3", "b4"));
  EXPECT_EQ(with_second, with_first);
}

// Adagrad's sum begins with its initial value on every tier. The memory around it begins with 0.
TEST_P(ParameterGroupsTest, StatesBeginAsTheirRuleSays) {
  const char* given = std::getenv("TEST_TMPDIR");
  const Config plain = ConfigFor(GetParam());
  for (Config config : {plain, OnNvme(plain, given == nullptr ? "/tmp" : given)}) {
    config.ebb.parameter_groups = {
        {"own",
         {.optimizer = OptimizerConfig{.type = OptimizerType::kAdagrad,
                                       .initial_accumulator_value = 0.25}}}};
    config.ebb.parameter_groups["factor"] = {.lr_factor = 0.5};
    std::atomic<int64_t> sums = 0, others = 0;
    RunOn(
        GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
          const auto expect = [&](float value, std::atomic<int64_t>& seen) {
            return [&, value](const Slice& slice, std::span<const float> values) {
              for (const float each : values) EXPECT_EQ(each, value) << slice.name;
              seen += static_cast<int64_t>(values.size());
              return absl::OkStatus();
            };
          };
          EBB_RETURN_IF_ERROR(engine.Read(StateClass::kOptimizer, expect(0.25f, sums), "sum"));
          EBB_RETURN_IF_ERROR(engine.Read(StateClass::kOptimizer, expect(0, others), "exp_avg"));
          EBB_RETURN_IF_ERROR(engine.Read(StateClass::kOptimizer, expect(0, others), "exp_avg_sq"));
          // The first update adds to it, on every rank that keeps a copy.
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
          return engine.Read(
              StateClass::kOptimizer,
              [](const Slice&, std::span<const float> values) {
                for (const float each : values) EXPECT_GE(each, 0.25f);
                return absl::OkStatus();
              },
              "sum");
        });
    EXPECT_EQ(sums, 13 * 10);
    EXPECT_EQ(others, 2 * (11 * 9 + 7 + 13 * 10 + 300 + 1));
  }
}

}  // namespace
}  // namespace ebb::testing::parameter_groups_test
