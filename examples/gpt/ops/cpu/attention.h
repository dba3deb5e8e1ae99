// Causal attention of one head at a time, in blocks of query rows. So only the scores of one block
// are in memory.
//
//   block of queries [rows, depth]  x  keys it may see [columns, depth]^T  ->  scores [rows,
//   columns]  ->  softmax  x  values
//
// Backward computes the probabilities again from the scores and the kept log-sum-exp (Dao et al.
// 2022, "FlashAttention", section 3.1 and appendix B). Each head runs on one thread, with that
// thread's scratch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/matmul.h"
#include "ops/ops.h"

namespace ebb::gpt::cpu {

class Attention {
 public:
  Attention(DType compute, Gemm& gemm);
  static int64_t ScratchFloats(int64_t tokens, int64_t depth);  // for one thread

  // Makes the products that these arrays' passes need; does not touch their memory.
  absl::Status Prepare(const AttentionArrays& arrays);
  absl::Status Prepare(const AttentionBackwardArrays& arrays);
  void ForwardHead(const AttentionArrays& arrays, int64_t sequence, int64_t head, float* scratch);
  void BackwardHead(const AttentionBackwardArrays& arrays, int64_t sequence, int64_t head,
                    float* scratch);

 private:
  struct Scratch;
  struct Products;
  Products ProductsOf(int64_t width, int64_t heads) const;
  // A head's columns of a matrix in the dtype of the products: unchanged, or widened into
  // `scratch`.
  Block Widened(const void* matrix, int64_t first, int64_t stride, int64_t tokens, int64_t depth,
                float* scratch) const;

  const DType compute_, multiplied_;
  Gemm& gemm_;
};

}  // namespace ebb::gpt::cpu
