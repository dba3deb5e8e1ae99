// Things that each parameter group of an engine has for itself: its learning rate under a schedule,
// and the names of its optimizer's states.
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
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/norm_records.h"
#include "tests/engine/scripted.h"
#include "tests/sharding/random_model.h"
#include "tests/status.h"

namespace ebb::testing::parameter_groups_test {
namespace {

using sharding::Interval;
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
INSTANTIATE_TEST_SUITE_P(Cells, ParameterGroupsTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 2, .stage = 0})), NameOf);

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
      RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        for (int64_t number = 0; number < 5; ++number) {
          ASSERT_OK_AND_ASSIGN(const ParameterValues before,
                               GatherAll(engine, model_, StateClass::kMaster));
          StepOptions options = kExactStep;
          if (number == 4) options.learning_rate = 0.03125;  // of all groups
          ASSERT_OK(TrainStep(engine, trainer, number, options));
          const ParameterValues sums = GradientSums(model_, setting.world, number);
          ASSERT_OK_AND_ASSIGN(const ParameterValues after,
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
          ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
          EXPECT_EQ(report.learning_rate, rate_of(kRate));
        }
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
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(TrainStep(engine, trainer, 0));
    for (const char* name : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
      ASSERT_OK_AND_ASSIGN(const std::set<std::string> here, ParametersWith(engine, name));
      const std::lock_guard<std::mutex> lock(mutex);
      (name[0] == 'm' ? with_momentum : with_moments).insert(here.begin(), here.end());
    }
    // Each name reaches its own array and no other's, which training goes on with.
    ASSERT_OK(engine.Write(StateClass::kOptimizer, Constant(0.5f), "momentum_buffer"));
    ASSERT_OK(engine.Write(StateClass::kOptimizer, Constant(0.25f), "exp_avg"));
    ASSERT_OK(engine.Write(StateClass::kOptimizer, Constant(4), "exp_avg_sq"));
    for (const auto& [name, value] : std::vector<std::pair<const char*, float>>{
             {"momentum_buffer", 0.5f}, {"exp_avg", 0.25f}, {"exp_avg_sq", 4.0f}}) {
      ASSERT_OK(engine.Read(
          StateClass::kOptimizer,
          [&, value = value](const Slice&, std::span<const float> values) {
            for (const float each : values) EXPECT_EQ(each, value) << name;
            return absl::OkStatus();
          },
          name));
    }
    const absl::Status unknown = ParametersWith(engine, "velocity").status();
    EXPECT_THAT(unknown, StatusIs(absl::StatusCode::kInvalidArgument, "no state 'velocity'",
                                  "momentum_buffer, exp_avg, exp_avg_sq"));
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
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer&) {
    ASSERT_OK_AND_ASSIGN(const std::set<std::string> first, ParametersWith(engine, "exp_avg"));
    ASSERT_OK_AND_ASSIGN(const std::set<std::string> second, ParametersWith(engine, "exp_avg_sq"));
    const std::lock_guard<std::mutex> lock(mutex);
    with_first.insert(first.begin(), first.end());
    with_second.insert(second.begin(), second.end());
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
    RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      const auto expect = [&](float value, std::atomic<int64_t>& seen) {
        return [&, value](const Slice& slice, std::span<const float> values) {
          for (const float each : values) EXPECT_EQ(each, value) << slice.name;
          seen += static_cast<int64_t>(values.size());
          return absl::OkStatus();
        };
      };
      ASSERT_OK(engine.Read(StateClass::kOptimizer, expect(0.25f, sums), "sum"));
      ASSERT_OK(engine.Read(StateClass::kOptimizer, expect(0, others), "exp_avg"));
      ASSERT_OK(engine.Read(StateClass::kOptimizer, expect(0, others), "exp_avg_sq"));
      // The first update adds to it, on every rank that keeps a copy.
      ASSERT_OK(TrainStep(engine, trainer, 0));
      ASSERT_OK(engine.Read(
          StateClass::kOptimizer,
          [](const Slice&, std::span<const float> values) {
            for (const float each : values) EXPECT_GE(each, 0.25f);
            return absl::OkStatus();
          },
          "sum"));
    });
    EXPECT_EQ(sums, 13 * 10);
    EXPECT_EQ(others, 2 * (11 * 9 + 7 + 13 * 10 + 300 + 1));
  }
}

// Every element of a shard has the options of its parameter's group, in as few parts as their rules
// allow.

// "a" and "b" follow the config's rule, "other" has its own; "unnamed" is not in the config.
void AddGroups(sharding::Random& random, ModelSpec& model, Config& config) {
  config.ebb.parameter_groups = {
      {"a", {.weight_decay = 0.0}},
      {"b", {.lr_factor = 0.5}},
      {"other", {.optimizer = OptimizerConfig{.type = OptimizerType::kSgd, .momentum = 0.9}}}};
  for (ParameterSpec& parameter : model.parameters)
    parameter.group = random.OneOf<std::string>({"", "unnamed", "a", "b", "other"});
}

void ExpectOptions(const UpdateTable::Set& set, const Config& config, const std::string& group) {
  if (group == "other") {
    EXPECT_EQ(set.optimizer, *config.ebb.parameter_groups.at("other").optimizer);
  } else {
    OptimizerConfig expected = config.optimizer;
    if (group == "a") expected.weight_decay = 0;
    EXPECT_EQ(set.optimizer, expected);
  }
  EXPECT_EQ(set.lr_factor, group == "b" ? 0.5 : 1);
}

// The set of element `at`, as an update of elements [at, at + 1) finds it.
const UpdateTable::Set& SetAt(const UpdateTable& table, int unit, int64_t at) {
  for (const UpdateTable::Part& part : table.parts(unit)) {
    if (at < part.begin || at >= part.end) continue;
    const UpdateTable::Runs in = table.RunsIn(part, at, at + 1);
    EXPECT_EQ(in.count, 1);
    const optim::UpdateRun& run = table.runs()[static_cast<size_t>(in.first)];
    EXPECT_GT(run.end, at);
    const UpdateTable::Set& set = table.sets()[static_cast<size_t>(run.set)];
    EXPECT_EQ(optim::UpdateRuleOf(set.optimizer), part.rule);
    return set;
  }
  ADD_FAILURE() << "no part has element " << at << " of unit " << unit;
  return table.sets().front();
}

TEST(UpdateTable, HasTheOptionsOfEveryElement) {
  int planned = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    sharding::RandomCase random_case(seed);
    random_case.own_optimizer = false;
    random_case.config.optimizer = {.weight_decay = 0.1};
    sharding::Random random(seed);
    AddGroups(random, random_case.model, random_case.config);
    random_case.optimizer_states = 2;
    SCOPED_TRACE(random_case.description());
    const auto plan = sharding::PlanStep(random_case.inputs());
    if (!plan.ok()) continue;  // row cuts that cannot be
    ++planned;
    for (int shard = 0; shard < plan->decisions.shards; ++shard) {
      const UpdateTable table(random_case.model, random_case.config, *plan, shard,
                              plan->decisions.stochastic_rounding);
      for (int u = 0; u < static_cast<int>(random_case.model.units.size()); ++u) {
        const sharding::Section& section = plan->layout.units[static_cast<size_t>(u)].trainable;
        const bool whole = plan->decisions.stage == 0;
        const int64_t begin = whole ? 0 : shard * section.shard;
        const int64_t elements = whole ? section.elements : section.shard;
        const std::vector<Interval> intervals =
            sharding::IntervalsIn(section, begin, begin + elements);
        for (const Interval& interval : intervals) {
          const std::string& group = random_case.model[interval.parameter].group;
          const int64_t last = interval.offset + interval.end - interval.begin - 1;
          for (const int64_t at : {interval.offset, last})
            ExpectOptions(SetAt(table, u, at), random_case.config, group);
        }
        int64_t end = 0;
        const UpdateTable::Part* before = nullptr;
        for (const UpdateTable::Part& part : table.parts(u)) {
          EXPECT_EQ(part.begin, end);
          end = part.end;
          EXPECT_EQ(end % optim::kRunMultiple, 0);
          EXPECT_TRUE(before == nullptr || part.rule != before->rule);
          before = &part;
        }
        EXPECT_EQ(end, intervals.empty() ? 0 : elements);
      }
    }
  }
  EXPECT_GT(planned, 30);
}

// A matrix and a vector by turns, as a model's blocks have them.
TEST(UpdateTable, RunsOfOneRuleAreOnePart) {
  ModelSpec model;
  const UnitId unit = model.AddUnit("block");
  for (int i = 0; i < 6; ++i) {
    const bool vector = i % 2 == 1;
    model.Add(unit, {.name = std::to_string(i),
                     .shape = {vector ? 64 : 4096},
                     .init = Constant(0),
                     .group = vector ? "no_decay" : ""});
  }
  model.forward = {{.unit = unit}};
  Config config;
  config.ebb.parameter_groups = {{"no_decay", {.weight_decay = 0.0}}};
  const sharding::PlanInputs inputs = {
      .model = &model, .config = &config, .world = 1, .optimizer_states = 2};
  ASSERT_OK_AND_ASSIGN(const auto plan, sharding::PlanStep(inputs));
  const UpdateTable table(model, config, plan, /*slice=*/0, plan.decisions.stochastic_rounding);
  EXPECT_EQ(table.sets().size(), 2u);
  ASSERT_EQ(table.parts(0).size(), 1u);
  const UpdateTable::Part& part = table.parts(0).front();
  EXPECT_EQ(part.runs, 6);
  EXPECT_EQ(part.end, 3 * (4096 + 64));
  const UpdateTable::Runs in = table.RunsIn(part, 4096, 2 * (4096 + 64));
  EXPECT_EQ(in.first, 1);
  EXPECT_EQ(in.count, 3);
}

// Each parameter with norms has a set of constants, so its runs are its own.
TEST(UpdateTable, EveryParameterHasASetOfNorms) {
  ModelSpec model;
  const UnitId unit = model.AddUnit("block");
  for (int i = 0; i < 6; ++i) {
    model.Add(unit, {.name = std::to_string(i),
                     .shape = {i % 2 == 1 ? 64 : 4096},
                     .init = Constant(0),
                     .group = i == 5 ? "plain" : ""});
  }
  model.forward = {{.unit = unit}};
  Config config;
  config.zero.stage = 3;
  config.optimizer.type = OptimizerType::kLamb;
  config.ebb.parameter_groups["plain"].optimizer = OptimizerConfig();
  const sharding::PlanInputs inputs = {
      .model = &model, .config = &config, .world = 2, .optimizer_states = 2};
  ASSERT_OK_AND_ASSIGN(const auto plan, sharding::PlanStep(inputs));
  // Slices of 6,272 elements: parameter 2 is cut.
  for (const int shard : {0, 1}) {
    const UpdateTable table(model, config, plan, shard, plan.decisions.stochastic_rounding);
    std::vector<int> of;
    for (const UpdateTable::Set& set : table.sets())
      of.push_back(set.parameter ? static_cast<int>(*set.parameter) : -1);
    EXPECT_EQ(of, shard == 0 ? (std::vector<int>{0, 1, 2}) : (std::vector<int>{2, 3, 4, -1}));
    ASSERT_EQ(table.parts(0).size(), shard == 0 ? 1u : 2u);
    EXPECT_EQ(table.parts(0).front().runs, 3);
    const sharding::NormRecords records = sharding::LayOutNormRecords(plan.layout, plan.decisions);
    EXPECT_EQ(records.entries, 3);
    EXPECT_TRUE(records.exchanged());
  }
}

}  // namespace
}  // namespace ebb::testing::parameter_groups_test
