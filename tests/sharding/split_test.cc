#include "ebb/sharding/split.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/status.h"

namespace ebb {
namespace {

using testing::Says;

ParameterSpec Cut(std::vector<int64_t> shape, Split split) {
  return {.name = "p", .shape = std::move(shape), .init = Constant(0), .split = std::move(split)};
}

// The picture in split.h.
TEST(Split, ABlockHasItsPartsOneBehindTheOther) {
  const Split split = {.dimension = 1, .parts = {4, 2}};
  const int64_t shape[] = {4, 6};
  EXPECT_EQ(BlockShape(shape, split, 0, 2), (std::vector<int64_t>{4, 3}));
  EXPECT_EQ(RunsOf(shape, split, 0, 2, 0, 5),
            (std::vector<BlockRun>{{0, 0, 2}, {4, 2, 1}, {6, 3, 2}}));
  EXPECT_EQ(RunsOf(shape, split, 1, 2, 0, 3), (std::vector<BlockRun>{{2, 0, 2}, {5, 2, 1}}));
}

TEST(Split, FirstRanksHaveOneMultipleMore) {
  const Split heads = {.dimension = 0, .parts = {12, 4}, .multiple = 4};
  const int64_t shape[] = {16, 2};
  // Three heads of the first part and one of the second, over one rank and over two.
  EXPECT_EQ(BlockShape(shape, heads, 0, 1), (std::vector<int64_t>{16, 2}));
  EXPECT_OK(CheckSplit(Cut({16, 2}, {.dimension = 0, .parts = {12, 4}, .multiple = 2}), 2));
  EXPECT_THAT(
      CheckSplit(Cut({16, 2}, heads), 2),
      Says("its split cuts part 1 of dimension 0 (4) by multiples of 4, which is 1 block for 2 "
           "tensor ranks: use at most 1 tensor rank"));
  EXPECT_THAT(CheckSplit(Cut({16, 2}, {.dimension = 0, .parts = {16, 0}}), 2),
              Says("part 1 of dimension 0, which is empty: leave that part out"));
  const Split sizes = {.dimension = 0, .sizes = {1, 12, 3}};
  EXPECT_EQ(RunsOf(shape, sizes, 2, 3, 0, 6), (std::vector<BlockRun>{{26, 0, 6}}));
}

// All elements of random shapes, cut in random ways: each is in one block, and where both
// directions say.
TEST(Split, RunsOfBlocksAndOfTheWholeAreEachOthersReverse) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t from, int64_t to) {
    return std::uniform_int_distribution<int64_t>(from, to)(random);
  };
  for (int number = 0; number < 300; ++number) {
    const auto ranks = static_cast<int>(draw(1, 4));
    Split split = {.dimension = static_cast<int>(draw(0, 2)), .multiple = draw(1, 3)};
    std::vector<int64_t> shape = {draw(1, 4), draw(1, 4), draw(1, 4)};
    int64_t& size = shape[static_cast<size_t>(split.dimension)] = 0;
    for (int64_t part = draw(1, 3); part > 0; --part)
      split.parts.push_back(split.multiple * draw(ranks, ranks + 3));
    size = std::accumulate(split.parts.begin(), split.parts.end(), int64_t{0});
    if (draw(0, 3) == 0) {
      split = {.dimension = split.dimension};
      for (int r = 0; r < ranks; ++r) split.sizes.push_back(draw(1, 4));
      size = std::accumulate(split.sizes.begin(), split.sizes.end(), int64_t{0});
    }
    SCOPED_TRACE(absl::StrCat("case ", number));
    ASSERT_OK(CheckSplit(Cut(shape, split), ranks));
    const int64_t elements = Elements(shape);
    std::vector<int> rank_of(static_cast<size_t>(elements), -1);
    std::vector<int64_t> local_of(rank_of.size());
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t own = Elements(BlockShape(shape, split, rank, ranks));
      int64_t next = 0;
      // In two pieces, and past the end.
      const int64_t cut = draw(0, own);
      for (const auto& [begin, end] : {std::pair(int64_t{0}, cut), {cut, own + 5}}) {
        for (const BlockRun& run : RunsOf(shape, split, rank, ranks, begin, end)) {
          ASSERT_EQ(run.local, next);
          next += run.count;
          for (int64_t i = 0; i < run.count; ++i) {
            ASSERT_EQ(rank_of[static_cast<size_t>(run.whole + i)], -1);
            rank_of[static_cast<size_t>(run.whole + i)] = rank;
            local_of[static_cast<size_t>(run.whole + i)] = run.local + i;
          }
        }
      }
      ASSERT_EQ(next, own);
    }
    const int64_t begin = draw(0, elements - 1), end = draw(begin, elements);
    int64_t next = begin;
    for (const auto& [rank, run] : RunsOfWhole(shape, split, ranks, begin, end)) {
      ASSERT_EQ(run.whole, next);
      next += run.count;
      for (int64_t i = 0; i < run.count; ++i) {
        ASSERT_EQ(rank_of[static_cast<size_t>(run.whole + i)], rank);
        ASSERT_EQ(local_of[static_cast<size_t>(run.whole + i)], run.local + i);
      }
    }
    ASSERT_EQ(next, end);
  }
}

TEST(Split, WhatDoesNotFitTheShapeIsRefused) {
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 2})), Says("split.dimension is 2"));
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 1, .parts = {4, 4}})),
              Says("split.parts are 4, 4, which are 8 in all"));
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 1, .multiple = 4})),
              Says("split.multiple is 4, which does not divide the size 6"));
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 1, .multiple = 0})),
              Says("split.multiple is 0"));
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 1, .parts = {6}, .sizes = {2, 4}})),
              Says("leave out split.parts"));
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 1, .sizes = {2, 4}}), 3),
              Says("split.sizes has 2 sizes for 3 tensor ranks"));
  EXPECT_THAT(CheckSplit(Cut({4, 6}, {.dimension = 1}), 7), Says("use at most 6 tensor ranks"));
  ParameterSpec rows = Cut({4, 6}, {.dimension = 1});
  rows.cut_rows = 2;
  EXPECT_THAT(CheckSplit(rows), Says("set cut_rows to 0"));
  ParameterSpec said = Cut({4, 6}, {.dimension = 1});
  said.over_tensor = OverTensor::kLocal;
  EXPECT_THAT(CheckSplit(said), Says("leave out over_tensor"));
}

TEST(Split, EachTensorRankHasMemoryForTheLargestBlock) {
  ModelSpec model;
  const UnitId unit = model.AddUnit("layer");
  model.Add(unit, Cut({5, 3}, {.dimension = 0}));
  model.Add(unit, {.name = "norm", .shape = {3}, .init = Constant(1), .sums_gradient = true});
  const absl::StatusOr<ModelSpec> last = WithBlocks(model, 1, 2);
  ASSERT_OK(last.status());
  const ParameterSpec& cut = last->parameters[0];
  EXPECT_EQ(cut.shape, (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(ShownShape(cut), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(WholeShape(cut), (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(last->parameters[1].over_tensor, OverTensor::kWhole);
  // One rank: as if nothing were said.
  const absl::StatusOr<ModelSpec> one = WithBlocks(model, 0, 1);
  ASSERT_OK(one.status());
  EXPECT_FALSE(one->parameters[0].block.has_value());
  EXPECT_FALSE(one->parameters[1].sums_gradient);
  model.parameters[1].over_tensor = OverTensor::kLocal;
  EXPECT_THAT(WithBlocks(model, 0, 2).status(), Says("over_tensor is kLocal beside"));
}

}  // namespace
}  // namespace ebb
