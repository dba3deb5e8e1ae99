// The vectorised kernels of the CPU. Each works on a range of rows, columns or elements, which is
// the part of one thread. The division does not change the result of an element or row. `dtype` is
// that of the activations.
#pragma once

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cpu {

// The address of element `index`.
inline const void* At(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * SizeOf(dtype);
}
inline void* At(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * SizeOf(dtype);
}

// A block of a matrix: `stride` is the distance of its rows in elements.
struct Block {
  const void* data = nullptr;
  int64_t stride = 0;
};

// layer_norm.cc. Bytes for each element: the input read once from memory, the output written.
void NormRows(DType dtype, const NormArrays& arrays, int64_t begin, int64_t end);
void NormBackwardRows(DType dtype, const NormBackwardArrays& arrays, int64_t begin, int64_t end);
void NormBackwardColumns(DType dtype, const NormBackwardArrays& arrays, int64_t begin, int64_t end);

// element_wise.cc
void GeluRange(DType dtype, const void* input, void* output, int64_t begin, int64_t end);
void GeluBackwardRange(DType dtype, const void* input, void* output, void* gradient, int64_t begin,
                       int64_t end);
void AddRange(DType dtype, const void* a, const void* b, void* sum, int64_t begin, int64_t end);
void AddBiasRows(DType dtype, const AddBiasArrays& arrays, int64_t begin, int64_t end);
void ColumnSumsRange(DType dtype, const void* matrix, int64_t rows, int64_t columns,
                     const Target& sums, int64_t begin, int64_t end);

// To fp32, rows packed tightly.
void Widen(DType dtype, Block source, int64_t rows, int64_t columns, float* destination);
// target = beta * target + source + bias, from tightly packed fp32 rows; bias in `bias_dtype`, or
// null.
struct StoreArrays {
  const float* source = nullptr;
  const void* bias = nullptr;
  DType bias_dtype = DType::kFloat32;
  Target target = {};
  int64_t target_stride = 0;
};
void Store(const StoreArrays& arrays, int64_t rows, int64_t columns);

// embedding.cc
void EmbedRows(DType dtype, const EmbedArrays& arrays, int64_t begin, int64_t end);
// Rows of a table's gradient: row r gets the output gradients of positions[starts[r] ... starts[r +
// 1]), in that order.
struct ScatterArrays {
  const void* output_gradient = nullptr;
  const int32_t *starts = nullptr, *positions = nullptr;
  Target target = {};
  int64_t width = 0;
};
void ScatterRows(DType dtype, const ScatterArrays& arrays, int64_t begin, int64_t end);

// softmax.cc. Rows of a block of causal attention scores: row r may see `visible + r` of the
// `columns` columns, and the others become 0. probability = exp(scale * score - log_sum_exp).
struct SoftmaxArrays {
  float* scores = nullptr;  // [rows, columns]; Softmax overwrites them
  void* probabilities =
      nullptr;                   // in `dtype`, tightly packed; may be the scores where that is fp32
  float* log_sum_exp = nullptr;  // one for each row: Softmax writes it, SoftmaxBackward reads it
  int64_t rows = 0, columns = 0, visible = 0;
  float scale = 1;
};
void Softmax(DType dtype, const SoftmaxArrays& arrays);
// Computes the probabilities again, and score_gradients = scale * probability *
// (probability_gradient - row_dot).
struct SoftmaxBackwardArrays {
  SoftmaxArrays forward = {};
  const float* probability_gradients = nullptr;  // [rows, columns]
  const float* row_dots = nullptr;               // one for each row: output . output gradient
  void* score_gradients = nullptr;  // in `dtype`; may be probability_gradients where that is fp32
};
void SoftmaxBackward(DType dtype, const SoftmaxBackwardArrays& arrays);
// dots[r] = a[r] . b[r]
void RowDots(DType dtype, Block a, Block b, int64_t rows, int64_t columns, float* dots);
// Its logits are fp32, as those of CrossEntropyRows.
void LogitTermsRows(const CrossEntropyArrays& arrays, int64_t begin, int64_t end);
void CrossEntropyRows(DType dtype, const CrossEntropyArrays& arrays, int64_t begin, int64_t end);

}  // namespace ebb::gpt::cpu
