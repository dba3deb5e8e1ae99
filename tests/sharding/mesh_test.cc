// The numbers of ranks in a mesh, for random meshes: coordinates, groups, and the ranks that count.
#include "ebb/sharding/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace ebb {
namespace {

constexpr Axis kAll[] = {Axis::kPipeline, Axis::kReplica, Axis::kOuter, Axis::kInner,
                         Axis::kTensor};

Axes RandomAxes(std::minstd_rand& random) {
  Axes axes;
  const auto bits = random() % (1u << kAxes);
  for (const Axis axis : kAll)
    if ((bits >> static_cast<int>(axis)) & 1u) axes = axes | axis;
  return axes;
}

class MeshTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  MeshTest() : random_(GetParam() + 1) {
    for (int& size : mesh_.sizes) size = 1 + static_cast<int>(random_() % 3);
  }
  std::minstd_rand random_;
  Mesh mesh_;
};
INSTANTIATE_TEST_SUITE_P(Seeds, MeshTest, ::testing::Range(0u, 50u));

TEST_P(MeshTest, ARankIsItsCoordinatesInMixedRadixAndTensorIsInnermost) {
  for (int rank = 0; rank < mesh_.ranks(); ++rank) {
    int number = 0;
    for (const Axis axis : kAll) {
      const int coordinate = mesh_.coordinate(rank, axis);
      ASSERT_LT(coordinate, mesh_.size(axis));
      number = number * mesh_.size(axis) + coordinate;
    }
    EXPECT_EQ(number, rank);
    EXPECT_EQ(mesh_.index(rank, kWorldAxes), rank);
  }
  for (int rank = 0; rank < mesh_.size(Axis::kTensor); ++rank)
    EXPECT_EQ(mesh_.coordinate(rank, Axis::kTensor), rank);
}

TEST_P(MeshTest, RanksThatDifferInSomeAxesAreAGroupInTheOrderOfTheirNumbers) {
  const Axes axes = RandomAxes(random_);
  for (int rank = 0; rank < mesh_.ranks(); ++rank) {
    EXPECT_EQ(mesh_.with(rank, axes, mesh_.index(rank, axes)), rank);
    std::vector<int> group;
    for (int i = 0; i < mesh_.size(axes); ++i) {
      group.push_back(mesh_.with(rank, axes, i));
      EXPECT_EQ(mesh_.index(group.back(), axes), i);
      for (const Axis axis : kAll) {
        if (axes.Has(axis)) continue;
        EXPECT_EQ(mesh_.coordinate(group.back(), axis), mesh_.coordinate(rank, axis));
      }
    }
    EXPECT_EQ(std::set<int>(group.begin(), group.end()).size(), group.size());
    EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
  }
}

// A value of a rank, the same along `whole`: those that count are each value once.
TEST_P(MeshTest, OfValuesThatAreWholeAlongAxesEachCountsOnce) {
  const Axes whole = RandomAxes(random_);
  std::multiset<int> counted, expected;
  for (int rank = 0; rank < mesh_.ranks(); ++rank) {
    const int value = mesh_.with(rank, whole, 0);
    if (Counts(whole, mesh_, rank)) counted.insert(value);
    if (value == rank) expected.insert(value);
  }
  EXPECT_EQ(counted, expected);
  EXPECT_EQ(static_cast<int>(counted.size()) * mesh_.size(whole), mesh_.ranks());
}

TEST(MeshOf, TheConfigurationCutsDataRanksIntoReplicasAndShards) {
  Config config;
  EXPECT_EQ(MeshOf(config, 8).sizes, (std::array{1, 1, 8, 1, 1}));
  config.ebb.mesh.tensor = 2;
  EXPECT_EQ(MeshOf(config, 8).sizes, (std::array{1, 1, 4, 1, 2}));
  config.ebb.shard_group = 2;
  EXPECT_EQ(MeshOf(config, 8).sizes, (std::array{1, 2, 2, 1, 2}));
  config.zero.stage = 3;
  config.zero.hpz_partition_size = 2;
  EXPECT_EQ(MeshOf(config, 8).sizes, (std::array{1, 2, 1, 2, 2}));
}

}  // namespace
}  // namespace ebb
