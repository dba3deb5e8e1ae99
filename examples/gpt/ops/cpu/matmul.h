// Matrix products on the CPU: of one thread, and of all threads of a rank.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"
#include "ops/cpu/kernels.h"
#include "ops/ops.h"

namespace ebb::gpt::cpu {

// c[m, n] = accumulate * c + a[m, k] b[k, n] + bias[n]. Strides are in elements. A transposed
// operand is stored as [k, m] or [n, k], and its stride is between those rows.
struct GemmShape {
  int64_t m = 0, n = 0, k = 0;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
  bool a_transposed = false, b_transposed = false, bias = false, accumulate = false;
  DType inputs = DType::kFloat32;  // of a, b and bias: fp32 or, where HasNative, bf16
  DType output = DType::kFloat32;  // fp32 or the dtype of the inputs
  auto operator<=>(const GemmShape&) const = default;
};

// Matrix products of one thread, from oneDNN. Primitives are made once for each shape, before the
// first step or when they are first run; many threads may run one at once.
//
// oneDNN's own threads stay off (one OpenMP thread for each caller). So ranks that are threads of
// one process share no pool, and a rank uses the threads of its team. The bits of a product depend
// on its shape and strides, not on addresses.
class Gemm {
 public:
  Gemm();
  ~Gemm();

  // Makes and keeps what Run of this shape needs, for some thousand shapes; beyond that Run makes
  // it. An error is kResourceExhausted or oneDNN's.
  absl::Status Prepare(const GemmShape& shape);
  // Each thread that runs prepared products calls it; it allocates the thread's scratch.
  absl::Status PrepareThread();

  // Does nothing after an error. status() is the first error.
  void Run(const GemmShape& shape, const void* a, const void* b, const void* bias, void* c);
  absl::Status status() const;
  // Products that Run had to make, because they were not prepared or not kept.
  int64_t unprepared() const;

  // Whether this CPU multiplies numbers of `dtype` at full speed (bf16: AVX-512 BF16 or AMX).
  static bool HasNative(DType dtype);

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

// Matrix products spread over a rank's threads by rows, for any dtype of inputs and target.
//
// If the CPU multiplies the compute dtype natively and can write the target's dtype, the product
// goes straight to the target. Otherwise blocks of the inputs are widened to fp32, multiplied at
// fp32 speed in scratch, and stored from there:
//
//      widen a [rows, depth]   widen b [depth, columns]   ->   c [rows, columns] += a b   -> store
//      (bias, beta, rounding)
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
