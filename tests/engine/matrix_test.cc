// The project's main correctness test: whatever decides where state lives, when it moves and what
// runs beside what, the masters, moments, losses and norms are the same bits (DESIGN.md, "Same
// bits").
//
// Always: a pairwise covering array of all settings, the same with secondary shards, 50 random cells (EBB_SEED=n for others), and 12 of
// early updates on NVMe.
// With EBB_FULL=1: the product of all settings, as IsRedundant and ProductCells thin it out.
//
// matrix_test --digests=FILE writes what all these cells left behind instead of testing them, so that two
// commits can be compared (matrix_digests.h).
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/covering_array.h"
#include "tests/engine/matrix_cell.h"
#include "tests/engine/matrix_digests.h"
#include "tests/sharding/random_model.h"

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

bool Full() {
  const char* full = std::getenv("EBB_FULL");
  return full != nullptr && std::string_view(full) == "1";
}

bool Contains(std::span<const Axis> axes, Axis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

const std::vector<std::vector<int>>& PairwiseRows() {
  static const std::vector<std::vector<int>> rows = PairwiseCoveringArray(LevelCounts());
  return rows;
}

// Settings that a cell of the product takes by turns instead of with every combination of the
// others: who keeps activations, what is frozen, evaluations in between, and the reduction's
// dtypes, shard groups.
constexpr Axis kTakenByTurns[] = {kBoundaries,   kModel,      kBetween,     kCommunication,
                                  kAccumulation, kShardGroup, kActivations, kRule};
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
    const absl::StatusOr<Outcome> outcome = RunCell(cell);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(FirstDifference(*outcome, *reference), "");
  }
}

std::vector<Batch> Batches(Part part, int count) {
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) batches.push_back({part, i});
  return batches;
}
constexpr int kProductBatches = 12, kTierBatches = 9;

// Those that run always; with EBB_FULL=1 all.
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
TEST(ShardGroupTest, HasTheMastersOfAWorldWhoseReductionGroupItIs) {
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
          ASSERT_TRUE(expected.ok()) << expected.status();
          ASSERT_TRUE(outcome.ok()) << outcome.status();
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
