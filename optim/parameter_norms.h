// What LAMB and LARS know of a whole parameter before they update it: the squares of its elements, and of
// the direction in which the update would go (LARS: of the gradient).
//
// A block of 64 elements from the parameter's start on is summed in fp64: element i adds to lane i mod 32 in
// ascending order (fma), and the lanes are added as a binary tree: lane j with j + 16, then + 8, + 4, + 2,
// + 1. Slices and sub-groups begin at such blocks, and the sums of blocks are added exactly (exact_sum.h): so
// a parameter's two numbers are the same bits however it is cut over ranks, tiers and threads.
//
// Nothing is written but the sums. Bytes per element that are read: the gradient, and of LAMB master and both
// states, of LARS the master.
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

// Memory that is added to, and so begins as zeros.
struct NormSums {
  ExactSum parameter, direction;
};

// Adds those of elements of one parameter, the first of which begins a block. `constants`: of the rule,
// which takes norms; nothing is added where they say not to apply.
void SumNorms(ThreadTeam& team, UpdateRule rule, const UpdateArrays& arrays,
              const UpdateConstants& constants, NormSums& sums);

// By which a parameter's update is scaled (UpdateScalars::trust_ratio).
//   LAMB  You et al. 2020, algorithm 2: |w| / |u|, between min_coeff and max_coeff as in DeepSpeed
//   LARS  You et al. 2017, equation 6: trust_coefficient |w| / (|g| + weight_decay |w| + epsilon)
// 1 where one of the two is 0 or not finite.
double TrustRatio(const OptimizerConfig& optimizer, double parameter_squares,
                  double direction_squares);

}  // namespace ebb::optim
