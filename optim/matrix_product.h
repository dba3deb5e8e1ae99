// Products of matrices on the CPU, for optimizers that work on whole matrices (newton_schulz.h).
//
// An element is a sum in fp32 over ascending k, one fused multiply-add for each term, and is rounded
// once. So its bits depend on neither threads, tiles nor the processor's vectors.
#pragma once

#include <cstdint>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

// A matrix in memory. One of the strides, in elements, is 1: a transpose has them exchanged.
struct MatrixView {
  void* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;

  MatrixView Transposed() const { return {data, column_stride, row_stride}; }
};

// out = alpha a b + beta c, all of one dtype, fp32 or bf16. `out` is neither a nor b; it may be c.
struct Product {
  int64_t rows = 0, columns = 0, depth = 0;  // of out; of the sums
  DType dtype = DType::kFloat32;
  MatrixView a, b, out;
  MatrixView c = {};  // without data: beta is not used
  float alpha = 1, beta = 0;
  bool symmetric = false;  // the result is: one half is computed, and the other is a copy
};

void Multiply(ThreadTeam& team, const Product& product);

}  // namespace ebb::optim
