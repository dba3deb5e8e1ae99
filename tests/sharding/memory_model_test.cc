// The memory table against formulas for models of equal layers, where nothing is padded.
#include "ebb/sharding/memory_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "ebb/sharding/report/plan_table.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::memory_model_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Equal layers of 1,024 x world elements: whole slices of whole alignments.
struct Layers {
  int stage = 3, world = 4;
  int64_t slice = 1024;  // elements of a layer's, on each rank
  int layers = 6, depth = 1, rounds = 1, states = 2;
  int64_t micro_batches_per_round = 1, output_bytes = 0;
  bool deterministic_reduce = false;
  int64_t secondary = 1;  // ranks that hold secondary shards
  DType compute = DType::kBFloat16;
  ReduceAt reduce_at = ReduceAt::kDefault;

  int64_t elements() const { return slice * world; }
  int64_t parameters() const { return layers * elements(); }

  std::map<StateClass, int64_t> Predict() const {
    const ModelSpec model = UnitChain(std::vector<int64_t>(layers, elements()), output_bytes);
    Config config;
    config.compute = compute;
    config.ebb.micro_batches_per_round = micro_batches_per_round;
    config.gradient_accumulation_steps = rounds * micro_batches_per_round;
    config.zero.stage = stage;
    config.zero.param_persistence_threshold = 0;
    config.ebb.prefetch_depth = depth;
    config.ebb.coalesce_bytes = 0;
    config.ebb.reduce_at = reduce_at;
    config.ebb.deterministic_reduce = deterministic_reduce;
    config.zero.hpz_partition_size = secondary;
    const PlanInputs inputs{
        .model = &model, .config = &config, .world = world, .optimizer_states = states};
    const absl::StatusOr<Plan> plan = PlanStep(inputs);
    EXPECT_OK(plan);
    std::map<StateClass, int64_t> bytes;
    for (const MemoryRow& row : PredictMemory(plan->table.bytes)) {
      EXPECT_EQ(row.tier, Tier::kDevice);
      bytes[row.state] = static_cast<int64_t>(row.predicted_bytes);
    }
    return bytes;
  }
};

int64_t Pages(int64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}

class MemoryOfLayers : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, MemoryOfLayers, ::testing::Values(1, 2, 4, 8));

TEST_P(MemoryOfLayers, ParametersMastersAndStatesAreWholeOrOverTheRanksByStage) {
  for (int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    const Layers layers{.stage = stage, .world = GetParam()};
    const int64_t whole = layers.parameters(), slice = whole / layers.world;
    std::map<StateClass, int64_t> bytes = layers.Predict();
    EXPECT_EQ(bytes[StateClass::kParameter], Pages(2 * (stage == 3 ? slice : whole)));
    EXPECT_EQ(bytes[StateClass::kMaster], Pages(4 * (stage == 0 ? whole : slice)));
    EXPECT_EQ(bytes[StateClass::kOptimizer], Pages(2 * 4 * (stage == 0 ? whole : slice)));
  }
}

TEST_P(MemoryOfLayers, Float32ParametersAreTheirOwnMasters) {
  const Layers layers{.stage = 1, .world = GetParam(), .states = 0, .compute = DType::kFloat32};
  std::map<StateClass, int64_t> bytes = layers.Predict();
  EXPECT_EQ(bytes[StateClass::kParameter], Pages(4 * layers.parameters()));
  EXPECT_EQ(bytes.count(StateClass::kMaster), 0u);
  EXPECT_EQ(bytes.count(StateClass::kOptimizer), 0u);
}

TEST_P(MemoryOfLayers, GathersTakeTheUnitInUseAndThoseAhead) {
  for (int depth : {0, 1, 2, 3}) {
    SCOPED_TRACE(depth);
    const Layers layers{.stage = 3, .world = GetParam(), .depth = depth, .rounds = 3};
    EXPECT_EQ(layers.Predict()[StateClass::kGather],
              layers.world == 1 ? 0 : Pages((1 + depth) * 2 * layers.elements()));
  }
}

// A second copy of the model over each group of ranks, without layers that a step gathers once: the
// last layer, if there is one round, because its backward follows at once.
TEST_P(MemoryOfLayers, SecondaryShardsAreTheModelOverTheirGroup) {
  for (const int64_t group : {1, 2, 4}) {
    for (const int rounds : {1, 2, 4}) {
      SCOPED_TRACE(::testing::Message() << "groups of " << group << ", " << rounds << " rounds");
      Layers layers{.world = GetParam(), .rounds = rounds, .secondary = group};
      if (group >= layers.world) continue;
      const int64_t copied = layers.layers - (rounds == 1 ? 1 : 0);
      EXPECT_EQ(layers.Predict()[StateClass::kSecondary],
                group == 1 ? 0 : Pages(2 * copied * layers.elements() / group));
      layers.stage = 2;
      EXPECT_EQ(layers.Predict().count(StateClass::kSecondary), 0u);
    }
  }
}

// Whole gradients: the one that backward writes and the one that is being reduced. One rank reduces
// none, so it has only the shards, at every stage.
TEST_P(MemoryOfLayers, GradientsAreTwoUnitsAndTheShards) {
  for (int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    const Layers once{.stage = stage, .world = GetParam()};
    const int64_t whole = once.parameters(), slice = whole / once.world;
    const bool alone = once.world == 1, gathers = stage == 0 && !alone;
    // One contribution needs no accumulator beside the reduced bf16 slice.
    EXPECT_EQ(once.Predict()[StateClass::kGradient],
              Pages((alone ? 0 : 2 * 2 * once.elements()) + (gathers ? 4 * whole : 2 * slice)));
    const Layers rounds{
        .stage = stage, .world = GetParam(), .rounds = 2, .reduce_at = ReduceAt::kRound};
    EXPECT_EQ(rounds.Predict()[StateClass::kGradient],
              Pages(2 * 2 * rounds.elements() + 4 * (stage == 0 ? whole : slice)));
    // Reduced once a step, every layer has a whole accumulator.
    const Layers step{
        .stage = stage, .world = GetParam(), .rounds = 2, .reduce_at = ReduceAt::kStep};
    EXPECT_EQ(step.Predict()[StateClass::kGradient],
              Pages(4 * whole + (gathers ? 4 * whole : 2 * slice)));
  }
}

// Outputs of all layers but the last, and two gradients; an evaluation needs no more.
TEST_P(MemoryOfLayers, BoundariesOfOneRoundAreHeld) {
  const Layers layers{.world = GetParam(), .micro_batches_per_round = 2, .output_bytes = 1'024};
  const int64_t boundaries = layers.layers - 1;
  const int64_t bytes = layers.Predict()[StateClass::kActivation];
  EXPECT_GE(bytes, Pages((boundaries + 1) * 2 * 1'024));
  EXPECT_LE(bytes, Pages((boundaries + 2) * 2 * 1'024));
  EXPECT_EQ(Layers{.world = GetParam()}.Predict().count(StateClass::kActivation), 0u);
}

TEST_P(MemoryOfLayers, StagingHoldsCastsNormsAndRecords) {
  const Layers layers{.stage = 2, .world = GetParam(), .micro_batches_per_round = 2};
  EXPECT_EQ(layers.Predict()[StateClass::kStaging],
            Pages(2 * layers.elements() + 256 + (layers.world + 1) * kExchangeBytes));
  EXPECT_EQ(Layers{.world = GetParam()}.Predict()[StateClass::kStaging],
            Pages(256 + (layers.world + 1) * kExchangeBytes));
}

TEST_P(MemoryOfLayers, SumsInOrderStageABucketOrPiecesOfIt) {
  const int64_t world = GetParam();
  for (const int64_t slice : {int64_t{512}, int64_t{1} << 30}) {
    SCOPED_TRACE(slice);
    Layers layers{.world = GetParam(), .slice = slice, .layers = 1, .deterministic_reduce = true};
    const int64_t bucket = std::min(2 * layers.elements(), int64_t{64} << 20);
    const int64_t norm = std::max<int64_t>(slice / 1024 * 8, 256);
    EXPECT_EQ(layers.Predict()[StateClass::kStaging],
              Pages(norm + (world + 1) * kExchangeBytes + (world > 1 ? bucket : 0)));
  }
}

TEST(MemoryModel, HasARowForEachClassThatThePlanUses) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    std::map<StateClass, uint64_t> rows;
    for (const MemoryRow& row : PredictMemory(plan.table.bytes)) {
      ASSERT_TRUE(rows.emplace(row.state, row.predicted_bytes).second);
      ASSERT_GT(row.predicted_bytes, 0u);
    }
    for (int c = 0; c < kStateClasses; ++c) {
      const auto row = rows.find(static_cast<StateClass>(c));
      const uint64_t predicted = row == rows.end() ? 0 : row->second;
      ASSERT_EQ(predicted, static_cast<uint64_t>(
                               Pages(plan.table.bytes.On(Tier::kDevice)[static_cast<size_t>(c)])));
    }
    const auto workspace = rows.find(StateClass::kWorkspace);
    ASSERT_EQ(workspace != rows.end(), random_case.model.workspace_bytes > 0);
  }
}

// For any model the permanent state is at least its elements. The state is at most the shards'
// padding, the pool's alignment and the skew of large arrays more.
TEST(MemoryModel, PermanentStateIsWhatThePaddedShardsNeed) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    const Config& config = random_case.config;
    int64_t parameters = 0, owned = 0;
    for (size_t u = 0; u < plan.layout.units.size(); ++u) {
      const UnitLayout& unit = plan.layout.units[u];
      parameters += plan.decisions.kept_whole[u] ? unit.elements() : unit.shard();
      owned += config.zero.stage == 0 ? unit.trainable.elements : unit.trainable.shard;
    }
    const int64_t alignment = 2 * 256 * std::ssize(plan.layout.units), skew = 70'000;
    const auto bytes = [&](StateClass c) { return plan.table.bytes.Of(Tier::kDevice, c); };
    const auto expect = [&](StateClass c, int64_t least, int64_t most) {
      EXPECT_GE(bytes(c), least);
      EXPECT_LE(bytes(c), most);
    };
    const int64_t parameter_bytes = parameters * SizeOf(config.compute);
    expect(StateClass::kParameter, parameter_bytes, parameter_bytes + alignment);
    const int64_t masters = config.compute == DType::kFloat32 ? 0 : 4 * owned;
    expect(StateClass::kMaster, masters, masters == 0 ? 0 : masters + alignment + skew);
    const int64_t states = random_case.optimizer_states;
    expect(StateClass::kOptimizer, 4 * owned * states,
           owned * states == 0 ? 0 : states * (4 * owned + alignment + skew) + 2 * skew);
  }
}

TEST(MemoryModel, AnEvaluationOfARoundsMicroBatchesFits) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    int64_t largest = 0;
    for (int visit = 0; visit < plan.table.visits; ++visit)
      largest = std::max(largest, plan.table.ElementsOf(Purpose::kOutput, visit));
    if (largest == 0) continue;
    const Array& walk = plan.table[plan.table.Find(Purpose::kWalkOutputs)];
    ASSERT_EQ(walk.turn_bytes, largest);
    ASSERT_GE(walk.turns, 2 * random_case.config.ebb.micro_batches_per_round);
    ASSERT_LE(walk.turns * walk.turn_bytes,
              plan.table.bytes.Of(Tier::kDevice, StateClass::kActivation));
  }
}

// The text of a plan behind its legend.
std::vector<std::string> Lines(const Plan& plan) {
  std::vector<std::string> lines = absl::StrSplit(PlanTable(plan), '\n');
  EXPECT_EQ(lines.back(), "");
  lines.pop_back();
  const auto begins = std::find(lines.begin(), lines.end(), "The step begins.");
  EXPECT_GT(begins - lines.begin(), 2);
  return {begins, lines.end()};
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
  EXPECT_OK(plan);
  return *plan;
}

TEST(PlanTable, StartsWithTheStepAndALegend) {
  const std::string table = PlanTable(TwoLayers());
  EXPECT_THAT(table, StartsWith("Plan of a step: 2 ranks, stage 3, 1 rounds of 1 micro-batches, "
                                "updates late"));
  for (const char* word : {"#N operation N", "F1 and B1 the kernels", "or earlier steps"})
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

// The lines of the moment with this title.
std::vector<std::string> Behind(const std::vector<std::string>& lines, const std::string& title) {
  const auto begin = std::find(lines.begin(), lines.end(), title);
  EXPECT_NE(begin, lines.end()) << title;
  const auto end = std::find_if(begin + (begin == lines.end() ? 0 : 1), lines.end(),
                                [](const std::string& line) { return line.front() != ' '; });
  std::vector<std::string> operations;  // each on one line
  for (auto line = begin + 1; line < end; ++line) {
    const bool goes_on = line->substr(0, 26).find_first_not_of(' ') == std::string::npos;
    if (goes_on && !operations.empty()) {
      absl::StrAppend(&operations.back(), *line);
    } else {
      operations.push_back(*line);
    }
  }
  return operations;
}

TEST(PlanTable, ShowsMomentStreamArraysAndWaits) {
  const std::vector<std::string> lines = Lines(TwoLayers());
  const auto behind = [&](const char* title) { return Behind(lines, title); };
  EXPECT_EQ(Count(behind("The step begins."),
                  {" gather  ", "1024", "parameter of unit0 (parameter+0x0) -> ",
                   "gathered of unit0 (gather+0x0)"}),
            1);
  EXPECT_EQ(Count(behind("F0: the forward of unit0 opens."), {"kernels", "compute", "of unit0"}),
            1);
  EXPECT_EQ(Count(behind("B1: the backward of unit1 closes."),
                  {" reduce ", "gradient of unit1 (gradient+0x800) -> gradient shard of unit1",
                   "after B1, earlier steps"}),
            1);
  EXPECT_EQ(Count(behind("B0: the backward of unit0 closes."),
                  {" norm ", "gradient shard of unit0 (gradient+0x1000)"}),
            1);
  const std::vector<std::string> finish = behind("The step finishes.");
  for (const char* role : {" seal ", " exchange ", " conclude "})
    EXPECT_EQ(Count(finish, {role, "reduce"}), 1);
  EXPECT_EQ(Count(finish, {"copy control", "reduce"}), 3);
  EXPECT_EQ(Count(finish, {"update", "gradient shard of unit1"}), 1);
  EXPECT_EQ(Count(finish, {"master of unit1 (master+0x800)"}), 1);
}

TEST(PlanTable, NamesEachOperationAndEachUseOnce) {
  for (int seed = 1; seed <= Cases(100); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    int operations = 0, uses = 0;
    for (const std::string& line : Lines(plan)) {
      operations += absl::StartsWith(line, absl::StrFormat("%6d  ", operations)) ? 1 : 0;
      uses += absl::StartsWith(line, "        kernels ") ? 1 : 0;
      ASSERT_NE(line.back(), ' ');
      ASSERT_LE(line.size(), 140u);
    }
    ASSERT_EQ(operations, plan.Shown());
    ASSERT_EQ(uses, std::count_if(plan.moments.begin(), plan.moments.end(),
                                  [](const Moment& moment) { return moment.kernels >= 0; }));
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
    EXPECT_OK(plan);
    const std::string table = PlanTable(*plan);
    const std::vector<std::string> all = absl::StrSplit(table, '\n');
    return all;
  };
  EXPECT_EQ(Count(lines(), {"kernels of a recompute"}), 0);
  EXPECT_EQ(Count(lines(), {"the scopes that are still open"}), 0);
  for (const bool backward : {false, true}) {
    model.order.push_back({.backward = backward, .visit = 0});
    if (backward) model.AddScope({.recompute = true, .visit = 2});
    for (int visit : {1, 2})
      model.AddScope({.backward = backward, .visit = backward ? 3 - visit : visit});
    model.order.push_back({.opens = false, .backward = backward, .visit = 0});
  }
  EXPECT_EQ(Count(lines(), {"kernels of a recompute"}), 1);
  EXPECT_EQ(Count(lines(), {"the scopes that are still open"}), 1);
  const auto behind = [&](const char* title) { return Behind(lines(), title); };
  EXPECT_EQ(Count(behind("R2: the recompute of unit2 opens."), {"kernels", "unit2"}), 1);
  EXPECT_EQ(Count(behind("F1: the forward of unit1 closes."), {"kernels", "unit0"}), 1);
  EXPECT_EQ(Count(lines(), {"F0: the forward of unit0 closes."}), 0) << "nothing comes then";
  EXPECT_EQ(Count(behind("B0: the backward of unit0 closes."), {"norm", "unit0"}), 1);
  EXPECT_EQ(Count(behind("R2: the recompute of unit2 closes."), {" reduce  "}), 0);
}

TEST(PlanTable, ABucketHasALineForEachUnitWithItsArrays) {
  const ModelSpec model = UnitChain(std::vector<int64_t>(48, 1'024));
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
  ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(inputs));
  ASSERT_TRUE(std::any_of(plan.ops.begin(), plan.ops.end(), [](const Op& operation) {
    return operation.role == Role::kReduce && operation.parts.size() > 40;
  }));
  const std::vector<std::string> lines = Lines(plan);
  for (int u = 0; u < 48; ++u) {
    const auto array = [&](const char* name, const char* pool, Purpose purpose) {
      return absl::StrFormat("%s of unit%d (%s+0x%x)", name, u, pool,
                             plan.table.PlaceOf(plan.table.Find(purpose, u)).offset);
    };
    for (const std::string& at : {array("gathered", "gather", Purpose::kGathered),
                                  array("gradient", "gradient", Purpose::kGradient),
                                  array("gradient shard", "gradient", Purpose::kGradientShard),
                                  array("master", "master", Purpose::kMaster)})
      EXPECT_GT(Count(lines, {at}), 0) << at;
  }
}

}  // namespace
}  // namespace ebb::sharding::memory_model_test
