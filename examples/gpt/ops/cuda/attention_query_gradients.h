// The first half of attention's backward pass on tensor cores: gradients of queries. A block has
// kQueries queries of a head and walks over the keys and values that they see:
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
#include "ops/cuda/attention_tiles.h"
#include "ops/cuda/attention_work.h"

namespace ebb::gpt::cuda {

// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128.
template <class T, int kDepth>
struct AttentionQueryGradients {
  using Arrays = AttentionBackwardWork;
  static constexpr int kWarps = 4, kThreads = kWarps * kernel::kWarp;
  static constexpr int kRowTiles = 2, kWarpQueries = 16 * kRowTiles;
  static constexpr int kQueries = kWarps * kWarpQueries;
  static constexpr int kKeys = kDepth <= 64 ? 64 : 32;
  static constexpr int kSlab = 32;  // keys whose scores are in registers at a time
  static constexpr bool kHeld = kDepth <= 64;

  // Shared memory: queries and output gradients, then keys and values, twice.
  using Layout = TileLayout<kDepth>;
  static constexpr int kRowsBytes = Layout::Bytes(kQueries);
  static constexpr int kPair = 2 * kRowsBytes, kPairBytes = 2 * Layout::Bytes(kKeys);
  static constexpr int kSharedBytes = kPair + 2 * kPairBytes;

  using Slab = float[kRowTiles][kSlab / 8][4];
  using Left = LeftRows<kDepth, kRowTiles, kHeld>;
  // A number of each of a thread's rows: those of its group and 8 further down, of each row tile.
  using OfRows = float[kRowTiles][2];

  template <class Launched>
  EBB_HOST_DEVICE static void Run(Launched& launched, const Arrays& arrays) {
    kernel::MatrixThread<Launched> thread(launched);
    const HeadShape& shape = arrays.shape;
    const BlockPlace place = PlaceOf(thread.block(), shape);
    const int first = (static_cast<int>(shape.tiles) - 1 - place.tile) * kQueries;
    const int tokens = static_cast<int>(shape.tokens);
    const int end = first + kQueries < tokens ? first + kQueries : tokens;
    const int tiles = (end + kKeys - 1) / kKeys;
    const int warp_row = thread.warp() * kWarpQueries;
    const auto keys = ThirdOf(arrays.qkv, 1, sizeof(T), place.head, shape);
    const auto values = ThirdOf(arrays.qkv, 2, sizeof(T), place.head, shape);

    CopyTile<kDepth, kQueries, kThreads>(
        thread, 0, ThirdOf(arrays.qkv, 0, sizeof(T), place.head, shape), first, shape);
    CopyTile<kDepth, kQueries, kThreads>(
        thread, kRowsBytes, OutputOf(arrays.output_gradient, sizeof(T), place.head, shape), first,
        shape);
    CopyPair<kDepth, kKeys, kThreads>(thread, kPair, keys, values, 0, shape);
    WaitForTiles(thread);
    Left queries = {0, warp_row, {}}, output_gradients = {kRowsBytes, warp_row, {}};
    queries.Hold(thread);
    output_gradients.Hold(thread);

    OfRows minus_log2_sum, dots;
    DotRows(thread, arrays, place.head, first + warp_row, output_gradients, dots);
    for (int r = 0; r < kRowTiles; ++r) {
      for (int half = 0; half < 2; ++half) {
        const int query = first + warp_row + 16 * r + 8 * half + thread.lane() / 4;
        const int64_t at = int64_t{place.head} * shape.tokens + query;
        const bool inside = query < shape.tokens;
        minus_log2_sum[r][half] = inside ? -kLog2E * arrays.log_sum_exp[at] : 0;
        if (inside && thread.lane() % 4 == 0) arrays.row_dots[at] = dots[r][half];
      }
    }

    float gradients[kRowTiles][kDepth / 8][4];
    Clear(gradients);
    // The warp's first query, from the first key of the tile.
    int row = first + warp_row;
    for (int tile = 0; tile < tiles; ++tile, row -= kKeys) {
      const int pair = PairOf(tile);
      if (tile + 1 < tiles) {
        CopyPair<kDepth, kKeys, kThreads>(thread, PairOf(tile + 1), keys, values,
                                          (tile + 1) * kKeys, shape);
      }
      for (int slab = 0; slab < kKeys && slab < row + kWarpQueries; slab += kSlab) {
        Slab weights, score_gradients;
        MultiplyRows<T>(thread, queries, pair, slab, weights);
        MultiplyRows<T>(thread, output_gradients, pair + kPairBytes / 2, slab, score_gradients);
        Weigh(thread, row - slab, shape.scale_log2, minus_log2_sum, weights);
        Differentiate(weights, dots, score_gradients);
        AddRowsTimes<T, kDepth>(thread, score_gradients, pair, slab, gradients);
      }
      WaitForTiles(thread);
    }
    Scale(shape.scale, gradients);
    StoreRows<T, kDepth>(thread, gradients, 0, warp_row,
                         ThirdOf(arrays.qkv_gradient, 0, sizeof(T), place.head, shape),
                         first + warp_row, shape);
  }

 private:
  EBB_HOST_DEVICE static int PairOf(int tile) { return kPair + tile % 2 * kPairBytes; }

  // Output gradients are there as a product's left side; the outputs are read from memory in the
  // same order.
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

  // Scores become weights, those of keys after the query 0.
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
    if (row >= kSlab - 1) return;
    // The thread's first query less its first key; those of others are a constant away.
    const int ahead = row + thread.lane() / 4 - 2 * (thread.lane() % 4);
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int n = 0; n < kSlab / 8; ++n) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (8 * n + i % 2 - 16 * r - i / 2 * 8 > ahead) scores[r][n][i] = 0;
        }
      }
    }
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
