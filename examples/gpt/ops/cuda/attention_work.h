// The arguments of attention's kernels, and which kernel takes a call: a tiled kernel, by its
// template's width, or the plain one.
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

struct AttentionWork {
  HeadShape shape;
  const char* qkv;
  char* output;
  float* log_sum_exp;
};

// For both halves of the backward pass.
struct AttentionBackwardWork {
  HeadShape shape;
  const char *qkv, *output, *output_gradient;
  const float* log_sum_exp;
  float* row_dots;  // [sequences, heads, tokens]: the first half writes it, the second reads it
  char* qkv_gradient;
};

// The width of the tiled kernels for a head's width: 64 or 128, because more would take minutes to
// build. 0: no tiled kernel takes the call. Rows are copied 16 bytes at a time, so all must begin
// at multiples of 16.
template <class... Pointers>
int TiledDepth(int64_t depth, const Pointers*... arrays) {
  constexpr int64_t kRowAlignment = 8, kDepthMax = 128, kStep = 64;
  const bool aligned = ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
  if (!aligned || depth % kRowAlignment != 0 || depth > kDepthMax) return 0;
  return static_cast<int>((depth + kStep - 1) / kStep * kStep);
}

}  // namespace ebb::gpt::cuda
