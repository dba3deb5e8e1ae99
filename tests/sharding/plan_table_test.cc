#include "ebb/sharding/plan_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "random_model.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_table_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// What the step is, the columns and the rows; the legend is left out.
std::vector<std::string> Lines(const Plan& plan) {
  std::vector<std::string> lines = absl::StrSplit(PlanTable(plan), '\n');
  EXPECT_EQ(lines.back(), "");
  lines.pop_back();
  const auto columns = std::find_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find_first_not_of(' ') == line.find('#') && line.find("address") != line.npos;
  });
  EXPECT_GT(columns - lines.begin(), 2);
  lines.erase(lines.begin() + 1, columns);
  return lines;
}

// Two layers at stage 3 on 2 ranks in bf16, one step of one micro-batch.
Plan TwoLayers() {
  const ModelSpec model = UnitChain({1'024, 1'024});
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.ebb.coalesce_bytes = 0;
  const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
  const absl::StatusOr<Plan> plan = PlanStep(inputs);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

TEST(PlanTable, StartsWithTheStepAndTheColumns) {
  const std::vector<std::string> lines = Lines(TwoLayers());
  EXPECT_THAT(lines[0], HasSubstr("2 ranks, stage 3, 1 rounds of 1 micro-batches, updates late"));
  const std::vector<std::string> columns = absl::StrSplit(lines[1], ' ', absl::SkipEmpty());
  EXPECT_THAT(columns, testing::ElementsAre("#", "when", "operation", "unit", "stage", "stream",
                                            "after", "bytes", "address"));
}

TEST(PlanTable, HasALegendOfItsColumns) {
  const std::string table = PlanTable(TwoLayers());
  for (const char* column : {"when", "operation", "after", "address"})
    EXPECT_THAT(table, HasSubstr(absl::StrCat("\n  ", column, " ")));
  for (const char* word :
       {"#N operation N", "B3 the kernels", "earlier the last uses", "F forward, B backward"})
    EXPECT_THAT(table, HasSubstr(word));
}

// The lines that hold all of these words.
int Count(const std::vector<std::string>& lines, std::vector<std::string> words) {
  return static_cast<int>(std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
    return std::all_of(words.begin(), words.end(), [&](const std::string& word) {
      return line.find(word) != std::string::npos;
    });
  }));
}

TEST(PlanTable, ShowsMomentStreamAndWaits) {
  const std::vector<std::string> lines = Lines(TwoLayers());
  EXPECT_EQ(Count(lines, {"begin", "gather", "unit0", "earlier", "1024", "gather+0x0"}), 1);
  EXPECT_EQ(Count(lines, {"open F0", "use", "unit0", "compute"}), 1);
  EXPECT_EQ(Count(lines, {"open B1", "use", "unit1", "earlier"}), 1);
  EXPECT_EQ(Count(lines, {"close B1", "reduce", "unit1", "B1 earlier", "gradient+0x800"}), 1);
  EXPECT_EQ(Count(lines, {"close B0", "norm", "unit0", "reduce", "gradient+0x1000"}), 1);
  EXPECT_EQ(Count(lines, {"finish", "seal", "reduce"}), 1);
  EXPECT_EQ(Count(lines, {"finish", "exchange", "reduce"}), 1);
  EXPECT_EQ(Count(lines, {"finish", "conclude", "reduce"}), 1);
  EXPECT_EQ(Count(lines, {"finish", "copy control", "reduce"}), 3);
  EXPECT_EQ(Count(lines, {"finish", "update", "unit1", "master+0x800"}), 1);
}

TEST(PlanTable, NamesEachOperationAndEachUseOnce) {
  for (int seed = 1; seed <= Cases(100); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::vector<std::string> lines = Lines(*plan);
    const size_t when = lines[1].find("when");
    const auto named = std::count_if(lines.begin() + 2, lines.end(),
                                     [&](const auto& line) { return line[when] != ' '; });
    ASSERT_EQ(named, plan->operations.size() + plan->scopes.size());
    for (const std::string& line : lines) ASSERT_NE(line.back(), ' ');
    ASSERT_THAT(lines[0], StartsWith("Plan of a step: "));
  }
}

// The root's kernels go on when a block's scope closes.
TEST(PlanTable, ShowsOverlappingScopesAndRecomputes) {
  Config config;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.ebb.coalesce_bytes = 0;
  ModelSpec model = UnitChain({1'024, 1'024, 1'024});
  const auto lines = [&] {
    const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
    const absl::StatusOr<Plan> plan = PlanStep(inputs);
    EXPECT_TRUE(plan.ok()) << plan.status();
    const std::string table = PlanTable(*plan);
    const std::vector<std::string> all = absl::StrSplit(table, '\n');
    return all;
  };
  EXPECT_EQ(Count(lines(), {"a recompute of the visit"}), 0);
  EXPECT_EQ(Count(lines(), {"goes on with what is still open"}), 0);
  for (const bool backward : {false, true}) {
    model.order.push_back({.backward = backward, .visit = 0});
    if (backward) model.AddScope({.recompute = true, .visit = 2});
    for (int visit : {1, 2})
      model.AddScope({.backward = backward, .visit = backward ? 3 - visit : visit});
    model.order.push_back({.opens = false, .backward = backward, .visit = 0});
  }
  EXPECT_EQ(Count(lines(), {"a recompute of the visit"}), 1);
  EXPECT_EQ(Count(lines(), {"goes on with what is still open"}), 1);
  EXPECT_EQ(Count(lines(), {"open R2", "use", "unit2"}), 1);
  EXPECT_EQ(Count(lines(), {"close F1", "use", "unit0"}), 1);
  EXPECT_EQ(Count(lines(), {"close F0", "use"}), 0);
  EXPECT_EQ(Count(lines(), {"close B0", "norm", "unit0"}), 1);
  EXPECT_EQ(Count(lines(), {"close R2", "reduce"}), 0);
}

TEST(PlanTable, ABucketHasALineForEachUnitWithItsAddress) {
  const ModelSpec model = UnitChain(std::vector<int64_t>(48, 1'024));
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
  const absl::StatusOr<Plan> plan = PlanStep(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_TRUE(
      std::any_of(plan->operations.begin(), plan->operations.end(), [](const Operation& operation) {
        return operation.kind == OperationKind::kReduce && operation.parts.size() > 40;
      }));
  const std::vector<std::string> lines = Lines(*plan);
  for (const std::string& line : lines) EXPECT_LE(line.size(), 140u) << line;
  for (int u = 0; u < 48; ++u) {
    const auto address = [&](const char* pool, int64_t offset) {
      return absl::StrFormat("%s+0x%x", pool, offset);
    };
    const std::string unit = absl::StrCat("unit", u, " ");
    const UnitAddresses& of_unit = plan->pools.units[u];
    for (const std::string& at :
         {address("gather", of_unit.gather_trainable),
          address("gradient", plan->pools.visits[u].gradient),
          address("gradient", of_unit.gradient_shard),
          address("master", plan->pools.placement.sub_groups[u].master.offset)}) {
      EXPECT_TRUE(std::any_of(lines.begin(), lines.end(),
                              [&](const std::string& line) {
                                return line.find(unit) != std::string::npos && line.ends_with(at);
                              }))
          << unit << at;
    }
  }
}

}  // namespace
}  // namespace ebb::sharding::plan_table_test
