// The second half of attention's backward pass on tensor cores: gradients of keys and values. A
// block has kKeys keys and values of a head and walks over the queries that see them. It is
// attention_query_gradients.h transposed, so that a warp's sums are for its own keys only:
//
//   scores^T = keys queries^T         weights = exp(scale * scores - log_sum_exp)
//   value_gradients = weights^T output_gradients
//   weight_gradients^T = values output_gradients^T
//   score_gradients = weights * (weight_gradients - row_dots)
//   key_gradients = scale * score_gradients^T queries
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_tiles.h"

namespace ebb::gpt::cuda {

// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128.
template <class T, int kDepth>
struct AttentionKeyGradients {
  using Arrays = AttentionBackwardWork;
  // A warp's two sums are as large as a head's width, so a wider head leaves fewer keys.
  static constexpr int kRowTiles = kDepth <= 64 ? 2 : 1, kWarpKeys = 16 * kRowTiles;
  static constexpr int kKeys = 128, kWarps = kKeys / kWarpKeys, kThreads = kWarps * kernel::kWarp;
  static constexpr int kQueries = kDepth <= 64 ? 64 : 32;  // shared memory of 97 KiB at most
  static constexpr int kSlab = 32;  // queries with scores in registers at a time
  static constexpr bool kHeld = false;

  // Shared memory: keys and values; then, twice, queries, output gradients and Statistics.
  using Layout = TileLayout<kDepth>;
  static constexpr int kRowsBytes = Layout::Bytes(kKeys);
  static constexpr int kTileBytes = Layout::Bytes(kQueries);
  static constexpr int kPair = 2 * kRowsBytes;
  // For a query: -log2(e) * log_sum_exp, and its row dot.
  struct Statistics {
    float minus_log2_sum[kQueries], dots[kQueries];
  };
  static_assert(sizeof(Statistics) % 128 == 0 && kThreads >= 2 * kQueries);
  static constexpr int kPairBytes = 2 * kTileBytes + static_cast<int>(sizeof(Statistics));
  static constexpr int kSharedBytes = kPair + 2 * kPairBytes;

  using Slab = float[kRowTiles][kSlab / 8][4];
  using Gradients = float[kRowTiles][kDepth / 8][4];

  template <class Launched>
  EBB_HOST_DEVICE static void Run(Launched& launched, const Arrays& arrays) {
    kernel::MatrixThread<Launched> thread(launched);
    const HeadShape& shape = arrays.shape;
    const BlockPlace place = PlaceOf(thread.block(), shape);
    const int first = place.tile * kKeys;
    const int begin = first / kQueries;
    const int end = static_cast<int>((shape.tokens + kQueries - 1) / kQueries);
    const int warp_row = thread.warp() * kWarpKeys;

    const auto queries = ThirdOf(arrays.qkv, 0, sizeof(T), place.head, shape);
    const auto output_gradients = OutputOf(arrays.output_gradient, sizeof(T), place.head, shape);

    CopyTile<kDepth, kKeys, kThreads>(
        thread, 0, ThirdOf(arrays.qkv, 1, sizeof(T), place.head, shape), first, shape);
    CopyTile<kDepth, kKeys, kThreads>(
        thread, kRowsBytes, ThirdOf(arrays.qkv, 2, sizeof(T), place.head, shape), first, shape);
    CopyPair<kDepth, kQueries, kThreads>(thread, PairOf(begin), queries, output_gradients, first,
                                         shape);
    StoreStatistic(thread, begin, LoadStatistic(thread, arrays, place.head, begin));
    WaitForTiles(thread);
    LeftRows<kDepth, kRowTiles, kHeld> keys = {0, warp_row, {}},
                                       values = {kRowsBytes, warp_row, {}};
    keys.Hold(thread);
    values.Hold(thread);

    Gradients key_gradients, value_gradients;
    Clear(key_gradients);
    Clear(value_gradients);
    // The warp's first key, relative to the first query of the tile.
    int row = warp_row;
    for (int tile = begin; tile < end; ++tile, row -= kQueries) {
      const int pair = PairOf(tile);
      float statistic = 0;
      if (tile + 1 < end) {
        CopyPair<kDepth, kQueries, kThreads>(thread, PairOf(tile + 1), queries, output_gradients,
                                             (tile + 1) * kQueries, shape);
        statistic = LoadStatistic(thread, arrays, place.head, tile + 1);
      }
      // The first queries may see none of the warp's keys.
      for (int slab = row < kSlab ? 0 : row / kSlab * kSlab; slab < kQueries; slab += kSlab) {
        Slab weights, score_gradients;
        MultiplyRows<T>(thread, keys, pair, slab, weights);
        Weigh(thread, row - slab, shape.scale_log2,
              StatisticsOf(thread, pair).minus_log2_sum + slab, weights);
        AddRowsTimes<T, kDepth>(thread, weights, pair + kTileBytes, slab, value_gradients);
        MultiplyRows<T>(thread, values, pair + kTileBytes, slab, score_gradients);
        Differentiate(thread, weights, StatisticsOf(thread, pair).dots + slab, score_gradients);
        AddRowsTimes<T, kDepth>(thread, score_gradients, pair, slab, key_gradients);
      }
      if (tile + 1 < end) StoreStatistic(thread, tile + 1, statistic);
      WaitForTiles(thread);
    }
    Scale(shape.scale, key_gradients);
    StoreRows<T, kDepth>(thread, key_gradients, 0, warp_row,
                         ThirdOf(arrays.qkv_gradient, 1, sizeof(T), place.head, shape),
                         first + warp_row, shape);
    StoreRows<T, kDepth>(thread, value_gradients, kRowsBytes, warp_row,
                         ThirdOf(arrays.qkv_gradient, 2, sizeof(T), place.head, shape),
                         first + warp_row, shape);
  }

 private:
  EBB_HOST_DEVICE static int PairOf(int tile) { return kPair + tile % 2 * kPairBytes; }
  template <class Thread>
  EBB_HOST_DEVICE static Statistics& StatisticsOf(Thread& thread, int pair) {
    return *reinterpret_cast<Statistics*>(thread.shared() + pair + 2 * kTileBytes);
  }

  // One number for each thread, loaded early and stored late. It is 0 past the last token; the
  // weights are 1 there, and are multiplied by output gradients of 0.
  template <class Thread>
  EBB_HOST_DEVICE static float LoadStatistic(Thread& thread, const Arrays& arrays, int head,
                                             int tile) {
    const int query = tile * kQueries + thread.index() % kQueries;
    if (thread.index() >= 2 * kQueries || query >= arrays.shape.tokens) return 0;
    const int64_t at = int64_t{head} * arrays.shape.tokens + query;
    return thread.index() < kQueries ? arrays.log_sum_exp[at] : arrays.row_dots[at];
  }
  template <class Thread>
  EBB_HOST_DEVICE static void StoreStatistic(Thread& thread, int tile, float value) {
    const int query = thread.index() % kQueries;
    Statistics& statistics = StatisticsOf(thread, PairOf(tile));
    if (thread.index() < kQueries) {
      statistics.minus_log2_sum[query] = -kLog2E * value;
    } else if (thread.index() < 2 * kQueries) {
      statistics.dots[query] = value;
    }
  }
  // Scores become weights; those of queries before the key become 0.
  template <class Thread>
  EBB_HOST_DEVICE static void Weigh(Thread& thread, int row, float scale_log2,
                                    const float* minus_log2_sum, Slab& scores) {
    const int group = thread.lane() / 4, pair = thread.lane() % 4;
    EBB_UNROLL
    for (int n = 0; n < kSlab / 8; ++n) {
      EBB_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float offset = minus_log2_sum[8 * n + 2 * pair + i % 2];
        EBB_UNROLL
        for (int r = 0; r < kRowTiles; ++r)
          scores[r][n][i] = Exp2(Fma(scores[r][n][i], scale_log2, offset));
      }
    }
    if (row + kWarpKeys <= 1) return;
    // The thread's first query minus its first key; its other numbers are a constant away.
    const int ahead = 2 * pair - row - group;
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int n = 0; n < kSlab / 8; ++n) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (16 * r + i / 2 * 8 - 8 * n - i % 2 > ahead) scores[r][n][i] = 0;
        }
      }
    }
  }

  template <class Thread>
  EBB_HOST_DEVICE static void Differentiate(Thread& thread, const Slab& weights, const float* dots,
                                            Slab& gradients) {
    const int pair = thread.lane() % 4;
    EBB_UNROLL
    for (int n = 0; n < kSlab / 8; ++n) {
      EBB_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float dot = dots[8 * n + 2 * pair + i % 2];
        EBB_UNROLL
        for (int r = 0; r < kRowTiles; ++r)
          gradients[r][n][i] = weights[r][n][i] * (gradients[r][n][i] - dot);
      }
    }
  }
};

}  // namespace ebb::gpt::cuda
