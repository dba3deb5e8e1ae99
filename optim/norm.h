// Accumulation of reduced gradients and the squares for the global norm, in one pass.
//
// The sum of squares has the same bits on every device, SIMD width and thread count. It is in fp64,
// over fixed blocks of 1,024 elements from the start of the shard. In a block, element i adds to
// lane i mod 16 in ascending order (fma), and the lanes are added as a binary tree: lane j with
// j + 8, then + 4, + 2, + 1. The sums of 1,024 blocks are added in the same way, without squaring,
// then 1,024 of the results, and so on until one sum is left.
//
//   elements    | 1,024 | 1,024 | 1,024 |  ...  | 1,024 | 1,024 | ...
//   of blocks   |   s   |   s   |   s   |  ...  |   s   |   s   | ...
//   of 1,024    |                   s                   |         ...
//
// Each level is a chain of 68 additions for any length of shard; 2^30 elements have three levels.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

inline constexpr int64_t kNormBlock = 1024;
constexpr int64_t NormBlocks(int64_t count) {
  return (count + kNormBlock - 1) / kNormBlock;
}

// Sum of squares of `count` elements. `blocks`: scratch of NormBlocks(count).
double SumOfSquares(ThreadTeam& team, const void* gradient, DType dtype, int64_t count,
                    std::span<double> blocks);
// The sum of the sums of blocks, or of a level above, which are overwritten.
double AddBlocks(std::span<double> blocks);

struct AccumulateArrays {
  const void* source = nullptr;
  DType source_dtype = DType::kFloat32;
  void* destination = nullptr;
  DType destination_dtype = DType::kFloat32;
  int64_t count = 0;
  bool add = true;  // false: the first contribution, which overwrites
};

// destination = (add ? destination : 0) + source in fp32, rounded to nearest even.
void Accumulate(ThreadTeam& team, const AccumulateArrays& arrays);
// Accumulates and returns the sum of squares of the written numbers.
double AccumulateAndSumSquares(ThreadTeam& team, const AccumulateArrays& arrays,
                               std::span<double> blocks);

}  // namespace ebb::optim
