// Functions that all kernels of attention share: the address of a head's rows, the part of a head
// that a block computes, and a few functions of numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// a * b + c, rounded once. The call is explicit, because the compiler contracts nothing by itself.
EBB_HOST_DEVICE float Fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
// The larger number; the other one if one is a NaN.
EBB_HOST_DEVICE float Larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return std::fmax(a, b);
#endif
}
EBB_HOST_DEVICE float MinusInfinity() {
  return kernel::NumberOf(0xff800000u);
}

// Attention of `sequences` with `heads` heads each; the same for all blocks of a launch. Tokens of
// a sequence and blocks of a launch are fewer than 2^31.
struct HeadShape {
  int64_t sequences = 0, tokens = 0, heads = 0, width = 0;
  int depth = 0;           // of a head: width / heads
  float scale = 1;         // of scores: 1 / sqrt(depth)
  float scale_log2 = 1;    // scale * log2(e): scores as exponents of 2
  int64_t tiles = 0;       // into which a head's tokens are cut, one for each block
  int64_t heads_near = 1;  // heads with blocks that run at the same time

  int64_t head_count() const { return sequences * heads; }
};

// `bytes`: of a number. Keys and values of heads that run at the same time should stay in the L2.
inline HeadShape ShapeOf(int64_t sequences, int64_t tokens, int64_t heads, int64_t width,
                         int64_t bytes, int64_t tile_rows) {
  constexpr int64_t kNearBytes = int64_t{16} << 20;
  const int64_t depth = width / heads;
  const float scale = 1 / std::sqrt(static_cast<float>(depth));
  return {.sequences = sequences,
          .tokens = tokens,
          .heads = heads,
          .width = width,
          .depth = static_cast<int>(depth),
          .scale = scale,
          .scale_log2 = scale * kLog2E,
          .tiles = (tokens + tile_rows - 1) / tile_rows,
          .heads_near =
              std::clamp<int64_t>(kNearBytes / (2 * tokens * depth * bytes), 1, sequences * heads)};
}

// A block's head, among those of all sequences, and its tile in the order of work.
struct BlockPlace {
  int head, tile;
};
// Groups of heads follow one another. In a group the first tiles of all its heads come first, then
// the second ones. So the heaviest tiles begin first, and none runs alone at the end.
EBB_HOST_DEVICE BlockPlace PlaceOf(int64_t block, const HeadShape& shape) {
  const auto tiles = static_cast<uint32_t>(shape.tiles), b = static_cast<uint32_t>(block);
  const auto near = static_cast<uint32_t>(shape.heads_near);
  const uint32_t first = b / (near * tiles) * near;
  const uint32_t left = static_cast<uint32_t>(shape.sequences * shape.heads) - first;
  const uint32_t group = left < near ? left : near, at = b - first * tiles;
  return {static_cast<int>(first + at % group), static_cast<int>(at / group)};
}

// Rows of one head, `stride` bytes apart. Byte: char, or const char.
template <class Byte>
struct HeadRows {
  Byte* first;
  int64_t stride;

  EBB_HOST_DEVICE Byte* Row(int row) const { return first + row * stride; }
};

// Queries (0), keys (1) or values (2) in [sequences * tokens, 3 * width] numbers of `bytes` bytes.
template <class Byte>
EBB_HOST_DEVICE HeadRows<Byte> ThirdOf(Byte* qkv, int third, int64_t bytes, int head,
                                       const HeadShape& shape) {
  const auto heads = static_cast<uint32_t>(shape.heads), h = static_cast<uint32_t>(head);
  const int64_t sequence = h / heads, of_sequence = h % heads;
  return {qkv + ((sequence * shape.tokens * 3 + third) * shape.width + of_sequence * shape.depth) *
                    bytes,
          3 * shape.width * bytes};
}
// All three of them.
template <class Byte>
struct QkvRows {
  HeadRows<Byte> queries, keys, values;
};
template <class Byte>
EBB_HOST_DEVICE QkvRows<Byte> QkvOf(Byte* qkv, int64_t bytes, int head, const HeadShape& shape) {
  return {ThirdOf(qkv, 0, bytes, head, shape), ThirdOf(qkv, 1, bytes, head, shape),
          ThirdOf(qkv, 2, bytes, head, shape)};
}
// The output or its gradient, [sequences * tokens, width].
template <class Byte>
EBB_HOST_DEVICE HeadRows<Byte> OutputOf(Byte* output, int64_t bytes, int head,
                                        const HeadShape& shape) {
  const auto heads = static_cast<uint32_t>(shape.heads), h = static_cast<uint32_t>(head);
  const int64_t sequence = h / heads, of_sequence = h % heads;
  return {output + (sequence * shape.tokens * shape.width + of_sequence * shape.depth) * bytes,
          shape.width * bytes};
}

// The arguments of the kernels.
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
