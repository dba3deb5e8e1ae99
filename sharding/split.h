// Blocks of whole parameters: which elements a tensor rank has, and where they lie in its block.
//
//   whole [4, 6], {.dimension = 1, .parts = {4, 2}} over two tensor ranks
//
//     0 0 1 1 0 1      rank 0's block [4, 3] is columns 0, 1 and 4; its first run in the whole is
//     0 0 1 1 0 1      elements 0 and 1, its second element 4, its third elements 6 and 7
//     ...
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/sharding/model.h"

namespace ebb {

// Elements that lie together in the whole parameter and in a block of it.
struct BlockRun {
  int64_t whole = 0, local = 0, count = 0;
  friend bool operator==(const BlockRun&, const BlockRun&) = default;
};
struct RunOfRank {
  int rank = 0;  // tensor rank
  BlockRun run;
  friend bool operator==(const RunOfRank&, const RunOfRank&) = default;
};

// The errors of a split by itself: a dimension that the shape lacks, parts or sizes that are not
// the dimension's, cut_rows with another dimension than the first.
absl::Status CheckSplit(const ParameterSpec& parameter);
// And for this many tensor ranks: a part with fewer multiples than ranks, other numbers of sizes.
absl::Status CheckSplit(const ParameterSpec& parameter, int tensor_ranks);

// For a split that these checks have passed: a rank's block of a parameter of this whole shape.
std::vector<int64_t> BlockShape(std::span<const int64_t> whole_shape, const Split& split, int rank,
                                int ranks);
// Elements [begin, end) of the rank's block, in its order.
std::vector<BlockRun> RunsOf(std::span<const int64_t> whole_shape, const Split& split, int rank,
                             int ranks, int64_t begin, int64_t end);
// Elements [begin, end) of the whole, in its order, as runs of the ranks' blocks.
std::vector<RunOfRank> RunsOfWhole(std::span<const int64_t> whole_shape, const Split& split,
                                   int ranks, int64_t begin, int64_t end);

// Elements [begin, end) of what this rank has of a parameter, as slices of the whole parameter.
// `local`: of the slice's first element, from `begin` on. What is behind the block is left out.
// Stops at the first error.
using ShowSlice = absl::FunctionRef<absl::Status(const Slice& whole, int64_t local)>;
absl::Status ForEachSlice(const ModelSpec& model, ParameterId parameter, int64_t begin, int64_t end,
                          ShowSlice show);
// Likewise of what another tensor rank has.
absl::Status ForEachSliceOf(const ModelSpec& model, ParameterId parameter, int tensor_rank,
                            int64_t begin, int64_t end, ShowSlice show);

// The reverse, of elements [begin, begin + values.size()) of the whole parameter: those that this rank
// has among elements [first, first + own.size()) of its own go to `own`.
void TakeOfWhole(const ParameterSpec& parameter, int64_t begin, std::span<const float> values,
                 int64_t first, std::span<float> own);

// A whole model as the plan of a tensor rank has it: with blocks for parameters with a split, and
// others whole over tensor. Without tensor ranks, or without any split, it is the model itself.
absl::StatusOr<ModelSpec> WithBlocks(ModelSpec model, int rank, int ranks);

}  // namespace ebb
