// The sums of a whole parameter that LAMB and LARS need before they update it: of the squares of
// its elements, and of the squares of the update's direction (LARS: of the gradient).
//
// A block of 64 elements from the parameter's start on is summed in fp64: element i adds to lane i
// mod 32 in ascending order (fma), and the lanes are added as a binary tree: lane j with j + 16,
// then + 8, + 4, + 2, + 1. Slices and sub-groups begin at such blocks, and the sums of blocks are
// added exactly (exact_sum.h). So the cut over ranks, tiers and threads does not change the bits of
// a parameter's two numbers.
//
// Only the sums are written. Bytes read per element: the gradient, and for LAMB the master and both
// states, for LARS the master.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/optim/exact_sum.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/optim/update_constants.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

inline constexpr int64_t kExactBlock = 64;

// Sums to which SumNorms adds. They begin as zeros.
struct NormSums {
  ExactSum parameter, direction;
};

// Adds the squares of elements of one parameter; the first element begins a block. `constants`: of
// a rule that takes norms. Nothing is added if they say not to apply.
void SumNorms(ThreadTeam& team, UpdateRule rule, const UpdateArrays& arrays,
              const UpdateConstants& constants, NormSums& sums);

// The factor of a parameter's update (UpdateScalars::trust_ratio).
//   LAMB  You et al. 2020, algorithm 2: |w| / |u|, between min_coeff and max_coeff as in DeepSpeed
//   LARS  You et al. 2017, equation 6: trust_coefficient |w| / (|g| + weight_decay |w| + epsilon)
// 1 where one of the two is 0 or not finite.
double TrustRatio(const OptimizerConfig& optimizer, double parameter_squares,
                  double direction_squares);

}  // namespace ebb::optim
