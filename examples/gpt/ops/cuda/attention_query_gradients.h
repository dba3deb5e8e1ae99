// The first half of attention's backward pass on tensor cores: gradients of queries.
//
//   scores = queries keys^T           weights = exp(scale * scores - log_sum_exp)
//   weight_gradients = output_gradients values^T
//   score_gradients = weights * (weight_gradients - row_dots)
//   query_gradients = scale * score_gradients keys
//
// It also leaves row_dots, output . output_gradient of each query, for the second half.
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_query_walk.h"
#include "ops/cuda/attention_tiles.h"

namespace ebb::gpt::cuda {

// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128.
template <class T, int kDepth>
struct AttentionQueryGradients {
  using Arrays = AttentionBackwardWork;
  using Walk = QueryWalk<T, kDepth, /*kOwnTiles=*/2>;  // queries and output gradients
  static constexpr int kThreads = Walk::kThreads, kSharedBytes = Walk::kSharedBytes;
  static constexpr int kQueries = Walk::kQueries, kRowTiles = Walk::kRowTiles, kKeys = Walk::kKeys;
  static constexpr int kSlab = 32;  // keys with scores in registers at a time

  using Slab = float[kRowTiles][kSlab / 8][4];
  using Left = typename Walk::Left;
  using OfRows = typename Walk::OfRows;

  template <class Launched>
  EBB_HOST_DEVICE static void Run(Launched& launched, const Arrays& arrays) {
    kernel::MatrixThread<Launched> thread(launched);
    const HeadShape& shape = arrays.shape;
    const Walk walk(thread, arrays.qkv, shape);
    walk.CopyOwn(thread, 0, walk.rows.queries);
    walk.CopyOwn(thread, 1, OutputOf(arrays.output_gradient, sizeof(T), walk.head, shape));
    walk.CopyKeys(thread, 0);
    WaitForTiles(thread);
    Left queries = {0, walk.warp_row, {}}, output_gradients = {Walk::kRowsBytes, walk.warp_row, {}};
    queries.Hold(thread);
    output_gradients.Hold(thread);

    OfRows minus_log2_sum, dots;
    DotRows(thread, arrays, walk.head, walk.warp_first(), output_gradients, dots);
    for (int r = 0; r < kRowTiles; ++r) {
      for (int half = 0; half < 2; ++half) {
        const int query = walk.warp_first() + 16 * r + 8 * half + thread.lane() / 4;
        const int64_t at = int64_t{walk.head} * shape.tokens + query;
        const bool inside = query < shape.tokens;
        minus_log2_sum[r][half] = inside ? -kLog2E * arrays.log_sum_exp[at] : 0;
        if (inside && thread.lane() % 4 == 0) arrays.row_dots[at] = dots[r][half];
      }
    }

    float gradients[kRowTiles][kDepth / 8][4];
    Clear(gradients);
    // The warp's first query, relative to the first key of the tile.
    int row = walk.warp_first();
    for (int tile = 0; tile < walk.tiles; ++tile, row -= kKeys) {
      const int pair = Walk::PairOf(tile);
      if (tile + 1 < walk.tiles) walk.CopyKeys(thread, tile + 1);
      for (int slab = 0; slab < kKeys && slab < row + Walk::kWarpQueries; slab += kSlab) {
        Slab weights, score_gradients;
        MultiplyRows<T>(thread, queries, pair, slab, weights);
        MultiplyRows<T>(thread, output_gradients, pair + Walk::kTileBytes, slab, score_gradients);
        Weigh(thread, row - slab, shape.scale_log2, minus_log2_sum, weights);
        Differentiate(weights, dots, score_gradients);
        AddRowsTimes<T, kDepth>(thread, score_gradients, pair, slab, gradients);
      }
      WaitForTiles(thread);
    }
    Scale(shape.scale, gradients);
    StoreRows<T, kDepth>(thread, gradients, 0, walk.warp_row,
                         ThirdOf(arrays.qkv_gradient, 0, sizeof(T), walk.head, shape),
                         walk.warp_first(), shape);
  }

 private:
  // Output gradients are in shared memory as a product's left side. The outputs are read from
  // memory in the same order.
  template <class Thread>
  EBB_HOST_DEVICE static void DotRows(Thread& thread, const Arrays& arrays, int head, int first,
                                      const Left& output_gradients, OfRows& dots) {
    const HeadShape& shape = arrays.shape;
    const auto outputs = OutputOf(arrays.output, sizeof(T), head, shape);
    const int group = thread.lane() / 4, pair = thread.lane() % 4;
    for (int r = 0; r < kRowTiles; ++r) dots[r][0] = dots[r][1] = 0;
    EBB_UNROLL
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t words[kRowTiles][4];
      output_gradients.Get(thread, k, words);
      EBB_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int query = first + 16 * r + i % 2 * 8 + group;
          const int chunk = 2 * k + i / 2;
          uint32_t output = 0;
          if (query < shape.tokens && chunk * kChunkNumbers < shape.depth) {
            output = *reinterpret_cast<const uint32_t*>(outputs.Row(query) + chunk * kChunkBytes +
                                                        4 * pair);
          }
          float x[2], y[2];
          kernel::UnpackPair<T>(words[r][i], x[0], x[1]);
          kernel::UnpackPair<T>(output, y[0], y[1]);
          dots[r][i % 2] = Fma(x[1], y[1], Fma(x[0], y[0], dots[r][i % 2]));
        }
      }
    }
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int half = 0; half < 2; ++half) {
        dots[r][half] += thread.ShuffleXor(dots[r][half], 1);
        dots[r][half] += thread.ShuffleXor(dots[r][half], 2);
      }
    }
  }

  // Scores become weights; those of keys after the query become 0.
  template <class Thread>
  EBB_HOST_DEVICE static void Weigh(Thread& thread, int row, float scale_log2,
                                    const OfRows& minus_log2_sum, Slab& scores) {
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int n = 0; n < kSlab / 8; ++n) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i)
          scores[r][n][i] = Exp2(Fma(scores[r][n][i], scale_log2, minus_log2_sum[r][i / 2]));
      }
    }
    if (row < kSlab - 1) SetLaterColumns(thread, row, 0, scores);
  }

  EBB_HOST_DEVICE static void Differentiate(const Slab& weights, const OfRows& dots,
                                            Slab& gradients) {
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int n = 0; n < kSlab / 8; ++n) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i)
          gradients[r][n][i] = weights[r][n][i] * (gradients[r][n][i] - dots[r][i / 2]);
      }
    }
  }
};

}  // namespace ebb::gpt::cuda
