// What kernels of attention are launched with, and who takes which call: tiled kernels by their
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

// Of both halves of the backward pass.
struct AttentionBackwardWork {
  HeadShape shape;
  const char *qkv, *output, *output_gradient;
  const float* log_sum_exp;
  float* row_dots;  // [sequences, heads, tokens]: the first half writes, the second reads it
  char* qkv_gradient;
};

// The width that tiled kernels have for a head's, 64 or 128: more would take minutes to build. 0: they
// do not take it. Rows are copied 16 bytes at a time, so all of them have to begin at multiples of 16.
template <class... Pointers>
int TiledDepth(int64_t depth, const Pointers*... arrays) {
  constexpr int64_t kRowAlignment = 8, kDepthMax = 128, kStep = 64;
  const bool aligned = ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
  if (!aligned || depth % kRowAlignment != 0 || depth > kDepthMax) return 0;
  return static_cast<int>((depth + kStep - 1) / kStep * kStep);
}

}  // namespace ebb::gpt::cuda
