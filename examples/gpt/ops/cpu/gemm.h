// Matrix products of one thread, from oneDNN. Primitives are made once for each shape, before the
// first step or when they are first run; many threads may run one at once.
//
// oneDNN's own threads stay off (one OpenMP thread for each caller). So ranks that are threads of
// one process share no pool, and a rank uses the threads of its team. The bits of a product depend
// on its shape and strides, not on addresses.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "ebb/runtime/base/dtype.h"

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

}  // namespace ebb::gpt::cpu
