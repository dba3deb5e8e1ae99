// Every element of a shard has the options of its parameter's group, in as few parts as their rules
// allow.
#include "ebb/runtime/engine/update_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebb/sharding/interval.h"
#include "ebb/sharding/norm_records.h"
#include "tests/sharding/random_model.h"

namespace ebb::update_table_test {
namespace {

using sharding::Interval;

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
  const auto plan = sharding::PlanStep(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const UpdateTable table(model, config, *plan, /*slice=*/0, plan->decisions.stochastic_rounding);
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
  const auto plan = sharding::PlanStep(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  // Slices of 6,272 elements: parameter 2 is cut.
  for (const int shard : {0, 1}) {
    const UpdateTable table(model, config, *plan, shard, plan->decisions.stochastic_rounding);
    std::vector<int> of;
    for (const UpdateTable::Set& set : table.sets())
      of.push_back(set.parameter ? static_cast<int>(*set.parameter) : -1);
    EXPECT_EQ(of, shard == 0 ? (std::vector<int>{0, 1, 2}) : (std::vector<int>{2, 3, 4, -1}));
    ASSERT_EQ(table.parts(0).size(), shard == 0 ? 1u : 2u);
    EXPECT_EQ(table.parts(0).front().runs, 3);
    const sharding::NormRecords records =
        sharding::LayOutNormRecords(plan->layout, plan->decisions);
    EXPECT_EQ(records.entries, 3);
    EXPECT_TRUE(records.exchanged);
  }
}

}  // namespace
}  // namespace ebb::update_table_test
