// The layers' workspace, for the files that implement model/layers.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/layers.h"
#include "ops/ops.h"

namespace ebb::gpt {

// Kept of a norm's forward for its backward.
struct Layers::Statistics {
  float *mean = nullptr, *deviation = nullptr;
};

// Memory that one block keeps of one micro-batch's forward: 9 activations of the model's width for
// each token, and a few numbers for each row; of cut layers, the rank's share. Outputs of norms and
// GELU are not kept, because computing them again costs a pass over memory and no product.
struct Layers::Slot {
  void *qkv, *attention, *middle, *up;
  float* log_sum_exp;
  Statistics norm1, norm2;

  Slot(Arena& arena, const TensorShare& share, int64_t rows, int64_t own_rows, int64_t width,
       int64_t element);
};

struct Layers::Space {
  int64_t chunk_rows = 0;  // for the head
  std::byte* ops_scratch = nullptr;
  int64_t ops_scratch_bytes = 0;
  // Used in blocks. `hidden`: rows of 4 * width numbers; `row_scratch`: rows of `width`; both of all
  // tensor ranks' rows.
  void *hidden = nullptr, *hidden_gradient = nullptr, *row_scratch = nullptr,
       *row_scratch_gradient = nullptr;
  // The own ones among the rows in row_scratch; in the head, among those in `normal`.
  void *own_rows = nullptr, *own_normal = nullptr;
  // Used in the head. No block's pass overlaps it, so it has the same memory.
  void *logits = nullptr, *normal = nullptr, *normal_gradient = nullptr, *logit_gradient = nullptr;
  Statistics norm;
  float* last_logits = nullptr;
  RowTerms terms;             // of a chunk; at_target follows its sums
  void* last_rows = nullptr;  // a row of each tensor rank
  float* part_of_logits = nullptr;
  float *losses = nullptr, *loss = nullptr;  // of a micro-batch's rows, and their mean
  std::vector<Slot> slots;
  int64_t bytes = 0;

  static OpsLimits Limits(const GptShape& shape, const Options& options);
  // Over a null base it only counts.
  Space(const Processor& processor, const GptShape& shape, const Options& options, std::byte* base);
};

}  // namespace ebb::gpt
