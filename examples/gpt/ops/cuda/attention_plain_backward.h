// attention_plain.h's backward pass, in two halves as on tensor cores: first the gradients of
// queries, which also leaves the row dots, and then those of keys and values. A warp has rows of
// one kind, and each lane a row of the other.
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_plain.h"

namespace ebb::gpt::cuda {

template <class T>
struct PlainAttentionQueryGradients : Plain {
  using Arrays = AttentionBackwardWork;
  struct Shared {
    Weights weights;
    Rows queries, output_gradients;
    Tile keys, values;
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& arrays) {
    const HeadShape& shape = arrays.shape;
    const BlockPlace place = PlaceOf(thread.block(), shape);
    const int first = (static_cast<int>(shape.tiles) - 1 - place.tile) * kRows;
    auto& shared = *reinterpret_cast<Shared*>(thread.shared());
    const auto [queries, keys, values] = QkvOf(arrays.qkv, sizeof(T), place.head, shape);
    const auto output_gradients = OutputOf(arrays.output_gradient, sizeof(T), place.head, shape);
    const int slabs = Slabs(shape.depth);

    OfRows minus_log2_sum = {}, dots = {};
    LoadStatistics(thread, arrays, place.head, first, minus_log2_sum, dots);
    for (int slab = 0; slab < slabs; ++slab) {
      Sums sums = {};
      for (int tile = 0; tile < first + kRows && tile < shape.tokens; tile += kTile) {
        OfRows scores = {}, weight_gradients = {};
        for (int i = 1; i <= slabs; ++i) {
          const int s = (slab + i) % slabs;  // `slab` comes last, so that it stays
          thread.Sync();
          Load<T>(thread, queries, first, s, shape, shared.queries);
          Load<T>(thread, output_gradients, first, s, shape, shared.output_gradients);
          Load<T>(thread, keys, tile, s, shape, shared.keys);
          Load<T>(thread, values, tile, s, shape, shared.values);
          thread.Sync();
          const int columns = Columns(shape.depth, s);
          AddDots(thread, shared.queries, shared.keys, columns, scores);
          AddDots(thread, shared.output_gradients, shared.values, columns, weight_gradients);
        }
        OfRows score_gradients;
        for (int i = 0; i < kWarpRows; ++i) {
          const int query = first + thread.warp() * kWarpRows + i;
          const float weight = Exp2(Fma(scores[i], shape.scale_log2, minus_log2_sum[i]));
          score_gradients[i] =
              tile + thread.lane() > query ? 0 : weight * (weight_gradients[i] - dots[i]);
        }
        AddWeighed(thread, score_gradients, shared.keys, Columns(shape.depth, slab), shared.weights,
                   sums);
      }
      const OfRows factors = {shape.scale, shape.scale, shape.scale, shape.scale};
      Store<T>(thread, sums, factors, ThirdOf(arrays.qkv_gradient, 0, sizeof(T), place.head, shape),
               first, slab, shape);
    }
  }

 private:
  template <class Thread>
  EBB_HOST_DEVICE static void LoadStatistics(Thread& thread, const Arrays& arrays, int head,
                                             int first, OfRows& minus_log2_sum, OfRows& dots) {
    const HeadShape& shape = arrays.shape;
    const auto outputs = OutputOf(arrays.output, sizeof(T), head, shape);
    const auto gradients = OutputOf(arrays.output_gradient, sizeof(T), head, shape);
    for (int i = 0; i < kWarpRows; ++i) {
      const int query = first + thread.warp() * kWarpRows + i;
      if (query >= shape.tokens) continue;  // the whole warp
      float dot = 0;
      for (int c = thread.lane(); c < shape.depth; c += kernel::kWarp) {
        dot =
            Fma(LoadNumber<T>(outputs.Row(query), c), LoadNumber<T>(gradients.Row(query), c), dot);
      }
      const int64_t at = int64_t{head} * shape.tokens + query;
      dots[i] = kernel::WarpSum(thread, dot);
      minus_log2_sum[i] = -kLog2E * arrays.log_sum_exp[at];
      if (thread.lane() == 0) arrays.row_dots[at] = dots[i];
    }
  }
};

template <class T>
struct PlainAttentionKeyGradients : Plain {
  using Arrays = AttentionBackwardWork;
  struct Shared {
    Weights weights;
    Rows keys, values;
    Tile queries, output_gradients;
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& arrays) {
    const HeadShape& shape = arrays.shape;
    const BlockPlace place = PlaceOf(thread.block(), shape);
    const int first = place.tile * kRows;
    auto& shared = *reinterpret_cast<Shared*>(thread.shared());
    const auto [queries, keys, values] = QkvOf(arrays.qkv, sizeof(T), place.head, shape);
    const auto output_gradients = OutputOf(arrays.output_gradient, sizeof(T), place.head, shape);
    const int slabs = Slabs(shape.depth);

    for (int slab = 0; slab < slabs; ++slab) {
      Sums key_sums = {}, value_sums = {};
      for (int tile = first; tile < shape.tokens; tile += kTile) {
        OfRows scores = {}, weight_gradients = {};
        for (int i = 1; i <= slabs; ++i) {
          const int s = (slab + i) % slabs;  // `slab` comes last, so that it stays
          thread.Sync();
          Load<T>(thread, keys, first, s, shape, shared.keys);
          Load<T>(thread, values, first, s, shape, shared.values);
          Load<T>(thread, queries, tile, s, shape, shared.queries);
          Load<T>(thread, output_gradients, tile, s, shape, shared.output_gradients);
          thread.Sync();
          const int columns = Columns(shape.depth, s);
          AddDots(thread, shared.keys, shared.queries, columns, scores);
          AddDots(thread, shared.values, shared.output_gradients, columns, weight_gradients);
        }
        const int query = tile + thread.lane();
        const int64_t at = int64_t{place.head} * shape.tokens + query;
        const bool inside = query < shape.tokens;
        const float minus_log2_sum = inside ? -kLog2E * arrays.log_sum_exp[at] : 0;
        const float dot = inside ? arrays.row_dots[at] : 0;
        OfRows weights, score_gradients;
        for (int i = 0; i < kWarpRows; ++i) {
          const bool seen = inside && first + thread.warp() * kWarpRows + i <= query;
          weights[i] = seen ? Exp2(Fma(scores[i], shape.scale_log2, minus_log2_sum)) : 0;
          score_gradients[i] = seen ? weights[i] * (weight_gradients[i] - dot) : 0;
        }
        const int columns = Columns(shape.depth, slab);
        AddWeighed(thread, weights, shared.output_gradients, columns, shared.weights, value_sums);
        AddWeighed(thread, score_gradients, shared.queries, columns, shared.weights, key_sums);
      }
      const OfRows one = {1, 1, 1, 1};
      const OfRows factors = {shape.scale, shape.scale, shape.scale, shape.scale};
      Store<T>(thread, key_sums, factors,
               ThirdOf(arrays.qkv_gradient, 1, sizeof(T), place.head, shape), first, slab, shape);
      Store<T>(thread, value_sums, one,
               ThirdOf(arrays.qkv_gradient, 2, sizeof(T), place.head, shape), first, slab, shape);
    }
  }
};

}  // namespace ebb::gpt::cuda
