// Matrix products spread over a rank's threads by rows, for any dtype of inputs and target.
//
// If the CPU multiplies the compute dtype natively and can write the target's dtype, the product
// goes straight to the target. Otherwise blocks of the inputs are widened to fp32, multiplied at
// fp32 speed in scratch, and stored from there:
//
//      widen a [rows, depth]   widen b [depth, columns]   ->   c [rows, columns] += a b   -> store
//      (bias, beta, rounding)
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "ebb/runtime/device/thread_team.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/kernels.h"
#include "ops/ops.h"

namespace ebb::gpt::cpu {

class Matmul {
 public:
  Matmul(DType compute, Gemm& gemm, ThreadTeam& team, std::span<float> scratch);
  static int64_t ScratchFloats(DType compute);

  void Run(const MatmulArrays& arrays);
  // Makes the products that Run of these arrays needs; does not touch their memory.
  absl::Status Prepare(const MatmulArrays& arrays);

 private:
  bool IsDirect(const MatmulArrays& arrays) const;
  GemmShape DirectShape(const MatmulArrays& arrays) const;
  // The shape for a block of so many rows, columns and depth, with `a` and `b` as from Widened.
  GemmShape BlockShape(const MatmulArrays& arrays, int64_t rows, int64_t columns, int64_t depth,
                       bool accumulate) const;
  // The rows of one thread's part.
  int64_t PartOf(const GemmShape& whole) const;
  absl::Status PrepareGemm(GemmShape whole);
  void RunDirect(const MatmulArrays& arrays);
  void RunBlocked(const MatmulArrays& arrays);
  // One product over the team; `shape` is for all rows.
  void RunGemm(const GemmShape& shape, const void* a, const void* b, const void* bias, void* c);
  // A block of an operand as the product needs it: unchanged, or widened into `scratch`.
  Block Widened(const void* matrix, int64_t stride, int64_t row, int64_t column, int64_t rows,
                int64_t columns, float* scratch);

  const DType compute_, multiplied_;
  Gemm& gemm_;
  ThreadTeam& team_;
  float *a_scratch_ = nullptr, *b_scratch_ = nullptr, *c_scratch_ = nullptr;
};

}  // namespace ebb::gpt::cpu
