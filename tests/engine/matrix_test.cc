// The project's main correctness test. Settings that decide where state is kept, when it moves and
// what overlaps change no bit of masters, moments, losses and norms (DESIGN.md, "Same bits"). All
// are near those of a plain loop in fp64.
//
// Always: a pairwise covering array of all settings, the same with secondary shards, 50 random
// cells (EBB_SEED=n for others), and 12 of early updates on NVMe. With EBB_FULL=1: the product of
// all settings, as IsRedundant and ProductCells thin it out.
//
// matrix_test --digests=FILE writes what all these cells left behind instead of testing them, so
// that two commits can be compared (matrix_digests.h).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/covering_array.h"
#include "tests/engine/fp64_reference.h"
#include "tests/engine/matrix_cell.h"
#include "tests/engine/matrix_digests.h"
#include "tests/full.h"
#include "tests/sharding/random_model.h"
#include "tests/status.h"

namespace ebb::testing {
namespace {

constexpr int kRandomCells = 50, kRandomEarlyCells = 12;

enum class Part { kPairwise, kSecondary, kRandom, kRandomEarly, kProduct, kTiers };
struct Batch {
  Part part{};
  int index = 0;
  friend std::ostream& operator<<(std::ostream& out, const Batch& batch) {
    return out << batch.index;
  }
};

uint64_t Seed() {
  const char* given = std::getenv("EBB_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

bool Contains(std::span<const Axis> axes, Axis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

const std::vector<std::vector<int>>& PairwiseRows() {
  static const std::vector<std::vector<int>> rows = PairwiseCoveringArray(LevelCounts());
  return rows;
}

// Settings that a cell of the product draws at random, because all combinations would be too many:
// kept activations, frozen parameters, evaluations in between, the reduction's dtypes, shard
// groups.
constexpr Axis kTakenByTurns[] = {kBoundaries,    kModel,        kBetween,
                                  kCommunication, kAccumulation, kShardGroup,
                                  kActivations,   kRule,         kStates};
// Tiers are multiplied with each other only (kTiers).
constexpr Axis kTierAxes[] = {kSize,        kParameters, kOptimizer, kGradients,
                              kFasterShare, kSubGroups,  kMasters,   kDisk};

// To the next combination of the axes' levels. False after the last one.
bool Advance(Cell& cell, std::span<const Axis> axes, const std::vector<int>& counts) {
  for (const Axis axis : axes) {
    cell[axis] = (cell[axis] + 1) % counts[axis];
    if (cell[axis] > 0) return true;
  }
  return false;
}

// One world and compute dtype; one cell of each set of settings that mean the same.
std::vector<Cell> ProductCells(int index) {
  const std::vector<int> counts = LevelCounts();
  Cell cell;
  cell[kWorld] = index % counts[kWorld];
  cell[kDType] = index / counts[kWorld];
  std::vector<Axis> multiplied;
  for (int axis = 0; axis < kAxes; ++axis) {
    if (axis != kWorld && axis != kDType && !Contains(kTakenByTurns, static_cast<Axis>(axis)) &&
        !Contains(kTierAxes, static_cast<Axis>(axis)))
      multiplied.push_back(static_cast<Axis>(axis));
  }
  std::vector<Cell> cells;
  sharding::Random turns(static_cast<uint64_t>(index));
  for (bool more = true; more;) {
    if (!cell.IsRedundant()) {
      cells.push_back(cell);
      for (const Axis axis : kTakenByTurns)
        cells.back()[axis] = static_cast<int>(turns.Between(0, counts[axis] - 1));
    }
    more = Advance(cell, multiplied, counts);
  }
  return cells;
}

// All tiers at one world and compute dtype, from stage 1 on; everything else by turns.
std::vector<Cell> TierCells(int index) {
  const std::vector<int> counts = LevelCounts();
  constexpr int kWorlds[] = {0, 1, 3};
  std::vector<Axis> multiplied(std::begin(kTierAxes), std::end(kTierAxes));
  multiplied.push_back(kStage);
  std::vector<Cell> cells;
  sharding::Random turns(static_cast<uint64_t>(1000 + index));
  Cell cell;
  for (bool more = true; more;) {
    cell[kWorld] = kWorlds[index % 3];
    cell[kDType] = index / 3;
    cell[kReduceAt] = 1;
    cell[kUpdate] = 1;
    if (cell[kStage] > 0 && !cell.IsRedundant()) {
      cells.push_back(cell);
      for (int axis = 0; axis < kAxes; ++axis) {
        const Axis other = static_cast<Axis>(axis);
        if (other != kWorld && other != kDType && !Contains(multiplied, other))
          cells.back()[other] = static_cast<int>(turns.Between(0, counts[axis] - 1));
      }
    }
    more = Advance(cell, multiplied, counts);
  }
  return cells;
}

std::vector<Cell> CellsOf(const Batch& batch) {
  switch (batch.part) {
    case Part::kPairwise: {
      Cell cell;
      const std::vector<int>& row = PairwiseRows()[static_cast<size_t>(batch.index)];
      std::copy(row.begin(), row.end(), cell.levels.begin());
      return {cell};
    }
    case Part::kSecondary: {
      Cell cell;
      const std::vector<int>& row = PairwiseRows()[static_cast<size_t>(batch.index)];
      std::copy(row.begin(), row.end(), cell.levels.begin());
      cell[kWorld] = 3;
      cell[kStage] = 3;
      cell[kShardGroup] = 0;
      cell[kPersistence] %= 2;
      cell[kSecondary] = 1;
      return {cell};
    }
    case Part::kRandom:
      return {RandomCell(Seed() * 1000 + static_cast<uint64_t>(batch.index))};
    case Part::kRandomEarly:
      return {RandomEarlyCell(Seed() * 1000 + static_cast<uint64_t>(batch.index))};
    case Part::kProduct:
      return ProductCells(batch.index);
    case Part::kTiers:
      return TierCells(batch.index);
  }
  return {};
}

const absl::StatusOr<Outcome>& ReferenceOutcome(const Cell& cell) {
  static std::map<Cell, absl::StatusOr<Outcome>> outcomes;
  const Cell reference = cell.Reference();
  const auto known = outcomes.find(reference);
  return known != outcomes.end() ? known->second
                                 : outcomes.emplace(reference, RunCell(reference)).first->second;
}

// How far rounding may take a cell from the exact result. The first step's loss and norm: 5 visits,
// forward and backward, are about 15 successive roundings u in the coarsest dtype of the gradients,
// so 32 u if all of them have one sign. Masters and later reports: Adam and LAMB divide a gradient
// by its size, and here no epsilon keeps a small gradient from a whole step. If gradients of
// relative error e nearly cancel, a share e of the weights moves the wrong way and is off by twice
// the step. Together they are off by 2 sqrt(e) of the distance that all weights moved.
struct Precision {
  double first = 0, later = 0;
};
Precision PrecisionOf(const Config& config) {
  double u = 0;
  for (const DType dtype : {config.compute, config.communication_dtype(), config.accumulation}) {
    u = std::max(u, dtype == DType::kBFloat16  ? std::ldexp(1, -9)
                    : dtype == DType::kFloat16 ? std::ldexp(1, -12)
                                               : std::ldexp(1, -24));
  }
  return {.first = 32 * u, .later = 2 * std::sqrt(32 * u)};
}

// Whether the weights stay near too. Lion's step has one size even for small gradients, and in 16
// bits so do the first steps of Adam and LAMB. Masters with stochastic rounding drift apart,
// and so do they where states are rounded.
bool FollowsFp64(const Config& config) {
  const OptimizerType type = config.optimizer.type;
  const bool divides = type == OptimizerType::kAdamW || type == OptimizerType::kLamb;
  const bool coarse = PrecisionOf(config).first > 1e-3;
  // The iteration multiplies small errors.
  const bool rounds_matrices = type == OptimizerType::kMuon && config.compute != DType::kFloat32;
  return type != OptimizerType::kLion && !rounds_matrices && !config.ebb.stochastic_rounding &&
         !(divides && coarse) && config.optimizer.states == OptimizerStates::kFloat32;
}

// Where the masters of a model begin, which any engine of it says.
absl::StatusOr<Fp64Reference::Vectors> FirstMasters(const ToyModel& model, const Config& config) {
  Config plain;
  plain.micro_batch_size = 1;
  plain.compute = config.compute;
  plain.ebb.stochastic_rounding = config.ebb.stochastic_rounding;
  plain.ebb.parameter_groups = config.ebb.parameter_groups;
  EBB_ASSIGN_OR_RETURN(Engine engine,
                       Engine::Create(World::Single(), Device::Cpu(1), model.spec(), plain));
  Fp64Reference::Vectors masters;
  for (const ParameterSpec& parameter : model.spec().parameters)
    masters.emplace_back(static_cast<size_t>(Elements(parameter.shape)));
  const auto keep = [&](const Slice& slice, std::span<const float> values) {
    std::copy(values.begin(), values.end(),
              masters[static_cast<size_t>(slice.parameter)].begin() + slice.begin);
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(engine.Read(StateClass::kMaster, keep));
  return masters;
}

// Each cell against arithmetic that knows nothing of engines: all cells that agree with each other
// could be wrong in the same way.
void ExpectNearFp64(const Cell& cell, const Outcome& outcome) {
  const Config config = cell.MakeConfig();
  const ToyModel model(cell.MakeModel());
  ASSERT_OK_AND_ASSIGN(const Fp64Reference::Vectors first, FirstMasters(model, config));
  const Precision precision = PrecisionOf(config);
  Fp64Reference reference(model, config, first);
  std::vector<Fp64Reference::Report> reports;
  for (int step = 0; step < kMatrixSteps; ++step) {
    reports.push_back(reference.Step(cell.world(),
                                     static_cast<int>(config.gradient_accumulation_steps), step,
                                     /*overflows=*/cell[kChecks] == 1 && step == 1));
  }
  for (const Outcome::Step& step : outcome.steps) {
    EXPECT_EQ(step.applied, cell[kChecks] == 0 || step.number != 1);
    if (step.number > 0 && !FollowsFp64(config)) continue;
    const Fp64Reference::Report& expected = reports[static_cast<size_t>(step.number)];
    const double apart = step.number == 0 ? precision.first : precision.later;
    EXPECT_NEAR(step.loss, expected.loss, apart * expected.loss) << step.number;
    if (cell[kChecks] == 0 || !step.applied) continue;
    EXPECT_NEAR(step.gradient_norm, expected.norm, apart * expected.norm) << step.number;
  }
  if (!FollowsFp64(config)) return;
  double apart = 0, way = 0;
  size_t at = 0;
  for (size_t p = 0; p < first.size(); ++p) {
    for (size_t i = 0; i < first[p].size(); ++i, ++at) {
      const double expected = reference.weights()[p][i];
      apart += std::pow(std::bit_cast<float>(outcome.state[0][at]) - expected, 2);
      way += std::pow(expected - first[p][i], 2);
    }
  }
  EXPECT_LT(std::sqrt(apart / way), precision.later);
}

class MatrixTest : public ::testing::TestWithParam<Batch> {
 protected:
  // Every engine logs its plan, and that a step was skipped.
  static void SetUpTestSuite() { setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0); }
};

TEST_P(MatrixTest, CellHasTheBitsOfItsReference) {
  const bool product = GetParam().part == Part::kProduct || GetParam().part == Part::kTiers;
  if (product && !Full()) GTEST_SKIP() << "set EBB_FULL=1";
  const std::vector<Cell> cells = CellsOf(GetParam());
  if (GetParam().part == Part::kRandom || GetParam().part == Part::kRandomEarly)
    std::cout << "EBB_SEED=" << Seed() << ": ";
  std::cout << (cells.size() == 1 ? cells[0].Describe() : absl::StrCat(cells.size(), " cells"))
            << "\n";
  for (const Cell& cell : cells) {
    SCOPED_TRACE(cell.Describe());
    const absl::StatusOr<Outcome>& reference = ReferenceOutcome(cell);
    ASSERT_TRUE(reference.ok()) << cell.Reference().Describe() << ": " << reference.status();
    ASSERT_OK_AND_ASSIGN(const Outcome outcome, RunCell(cell));
    ASSERT_EQ(FirstDifference(outcome, *reference), "");
    ExpectNearFp64(cell, outcome);
  }
}

std::vector<Batch> Batches(Part part, int count) {
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) batches.push_back({part, i});
  return batches;
}
constexpr int kProductBatches = 12, kTierBatches = 9;

// Cells that run always; with EBB_FULL=1 all.
std::vector<Cell> AllCells() {
  std::vector<Cell> cells;
  const auto add = [&](Part part, int count) {
    for (const Batch& batch : Batches(part, count)) {
      const std::vector<Cell> of_batch = CellsOf(batch);
      cells.insert(cells.end(), of_batch.begin(), of_batch.end());
    }
  };
  add(Part::kPairwise, static_cast<int>(PairwiseRows().size()));
  add(Part::kSecondary, static_cast<int>(PairwiseRows().size()));
  add(Part::kRandom, kRandomCells);
  add(Part::kRandomEarly, kRandomEarlyCells);
  if (Full()) {
    add(Part::kProduct, kProductBatches);
    add(Part::kTiers, kTierBatches);
  }
  return cells;
}

const auto kIndexAsName = [](const ::testing::TestParamInfo<Batch>& info) {
  return std::to_string(info.param.index);
};
INSTANTIATE_TEST_SUITE_P(Pairwise, MatrixTest,
                         ::testing::ValuesIn(Batches(Part::kPairwise,
                                                     static_cast<int>(PairwiseRows().size()))),
                         kIndexAsName);
// Every pair of the other settings beside secondary shards, which need several of them at once.
INSTANTIATE_TEST_SUITE_P(Secondary, MatrixTest,
                         ::testing::ValuesIn(Batches(Part::kSecondary,
                                                     static_cast<int>(PairwiseRows().size()))),
                         kIndexAsName);
INSTANTIATE_TEST_SUITE_P(Random, MatrixTest,
                         ::testing::ValuesIn(Batches(Part::kRandom, kRandomCells)), kIndexAsName);
INSTANTIATE_TEST_SUITE_P(RandomEarly, MatrixTest,
                         ::testing::ValuesIn(Batches(Part::kRandomEarly, kRandomEarlyCells)),
                         kIndexAsName);
INSTANTIATE_TEST_SUITE_P(Product, MatrixTest,
                         ::testing::ValuesIn(Batches(Part::kProduct, kProductBatches)),
                         kIndexAsName);

INSTANTIATE_TEST_SUITE_P(Tiers, MatrixTest,
                         ::testing::ValuesIn(Batches(Part::kTiers, kTierBatches)), kIndexAsName);

// Without clipping the norm, which depends on where slices begin, changes nothing.
TEST(ShardGroupTest, HasTheMastersOfAWorldWithThatReductionGroup) {
  for (int dtype = 0; dtype < 3; ++dtype) {
    for (int stage = 1; stage <= 3; ++stage) {
      for (const int group : {1, 2}) {
        for (const int rounds : {0, 1}) {
          Cell plain;
          plain[kWorld] = 3;
          plain[kDType] = dtype;
          plain[kRounds] = rounds;
          plain[kReduceAt] = 1;
          plain[kReductionGroup] = group;
          Cell grouped = plain;
          grouped[kStage] = stage;
          grouped[kShardGroup] = group;
          SCOPED_TRACE(grouped.Describe());
          const absl::StatusOr<Outcome> expected = RunCell(plain), outcome = RunCell(grouped);
          ASSERT_OK(expected);
          ASSERT_OK(outcome);
          ASSERT_EQ(outcome->state, expected->state);
        }
      }
    }
  }
}

TEST(DigestsTest, AreTheSameOfTheSameCellAndOthersOfAnother) {
  Cell other;
  other[kRule] = 1;
  const std::string path = ::testing::TempDir() + "/digests";
  ASSERT_EQ(WriteDigests(path, std::vector<Cell>{Cell(), other, Cell()}), absl::OkStatus());
  std::ifstream file(path);
  std::string first, second, third;
  std::getline(file, first);
  std::getline(file, second);
  std::getline(file, third);
  EXPECT_THAT(first, ::testing::StartsWith("cell\tworld 1, "));
  EXPECT_EQ(third, first);
  EXPECT_NE(second.substr(second.find("\tstate ")), first.substr(first.find("\tstate ")));
  int plans = 0, times = 0;
  for (std::string line; std::getline(file, line);) {
    plans += line.starts_with("plan\t") ? 1 : 0;
    if (!line.starts_with("plan-time\t")) continue;
    ++times;
    EXPECT_THAT(line, ::testing::ContainsRegex("\tGPU [0-9.e-]+\tCPU [0-9.e-]+$"));
  }
  EXPECT_GT(plans, 0);
  EXPECT_EQ(times, plans);
  EXPECT_EQ(WriteDigests("/proc/no file", {}).code(), absl::StatusCode::kUnavailable);
}

TEST(CoveringArrayTest, HasEveryPairOfSettings) {
  EXPECT_TRUE(MissingPairs(LevelCounts(), PairwiseRows()).empty());
}

TEST(CoveringArrayTest, MissingPairsAreFound) {
  const std::vector<int> levels = {2, 2};
  const std::vector<LevelPair> expected = {{0, 0, 1, 1}, {0, 1, 1, 0}};
  EXPECT_EQ(MissingPairs(levels, {{0, 0}, {1, 1}}), expected);
}

}  // namespace
}  // namespace ebb::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  constexpr std::string_view kDigests = "--digests=";
  const std::string_view option = argc == 2 ? argv[1] : "";
  if (!option.starts_with(kDigests)) return RUN_ALL_TESTS();
  setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0);
  const std::string file(option.substr(kDigests.size()));
  const absl::Status written = ebb::testing::WriteDigests(file, ebb::testing::AllCells());
  if (!written.ok()) std::cerr << "matrix_test: " << written.message() << "\n";
  return written.ok() ? 0 : 1;
}
