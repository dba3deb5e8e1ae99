// Attention's forward pass on tensor cores: a block has kQueries queries of a head and walks over the
// keys and values that they see, tile by tile, the next on its way while one is multiplied. Scores
// stay in registers, and so does the output, which is scaled down whenever a larger score is found.
//
// Bytes: qkv is read once where its keys and values stay in the L2, the output written once, 4 bytes
// a query and head for log_sum_exp.
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_tiles.h"
#include "ops/cuda/attention_work.h"

namespace ebb::gpt::cuda {

// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128.
template <class T, int kDepth>
struct AttentionForward {
  using Arrays = AttentionWork;
  static constexpr int kWarps = 4, kThreads = kWarps * kernel::kWarp;
  // Two row tiles a warp: each part of a key or value that is loaded from shared memory is used twice.
  static constexpr int kRowTiles = 2, kWarpQueries = 16 * kRowTiles;
  static constexpr int kQueries = kWarps * kWarpQueries;
  static constexpr int kKeys = kDepth <= 64 ? 64 : 32;  // as many scores as registers hold
  static constexpr bool kHeld = kDepth <= 64;

  // Shared memory: the queries, then keys and values, twice.
  using Layout = TileLayout<kDepth>;
  static constexpr int kPair = Layout::Bytes(kQueries), kPairBytes = 2 * Layout::Bytes(kKeys);
  static constexpr int kSharedBytes = kPair + 2 * kPairBytes;

  // A thread's rows are those of its group and 8 further down, of each row tile.
  struct Softmax {
    float largest[kRowTiles][2];  // score so far
    float sum[kRowTiles][2];      // of exp(scale * (score - largest)), over this thread's columns
  };
  using Scores = float[kRowTiles][kKeys / 8][4];
  using Output = float[kRowTiles][kDepth / 8][4];

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
    CopyPair<kDepth, kKeys, kThreads>(thread, kPair, keys, values, 0, shape);
    WaitForTiles(thread);
    LeftRows<kDepth, kRowTiles, kHeld> queries = {0, warp_row, {}};
    queries.Hold(thread);

    Softmax softmax;
    Output output;
    for (int r = 0; r < kRowTiles; ++r) {
      for (int half = 0; half < 2; ++half)
        softmax.largest[r][half] = MinusInfinity(), softmax.sum[r][half] = 0;
    }
    Clear(output);
    // The warp's first query, from the first key of the tile.
    int row = first + warp_row;
    for (int tile = 0; tile < tiles; ++tile, row -= kKeys) {
      const int pair = PairOf(tile);
      if (tile + 1 < tiles) {
        CopyPair<kDepth, kKeys, kThreads>(thread, PairOf(tile + 1), keys, values,
                                          (tile + 1) * kKeys, shape);
      }
      if (row + kWarpQueries > 0) {  // else no key of the tile is seen
        Scores scores;
        MultiplyRows<T>(thread, queries, pair, 0, scores);
        if (row < kKeys - 1) Hide(thread, row, scores);
        Weigh(thread, shape.scale_log2, softmax, output, scores);
        AddRowsTimes<T, kDepth>(thread, scores, pair + kPairBytes / 2, 0, output);
      }
      WaitForTiles(thread);
    }
    Store(thread, arrays, place.head, first + warp_row, warp_row, softmax, output);
  }

 private:
  EBB_HOST_DEVICE static int PairOf(int tile) { return kPair + tile % 2 * kPairBytes; }

  // Scores of keys after the query.
  template <class Thread>
  EBB_HOST_DEVICE static void Hide(Thread& thread, int row, Scores& scores) {
    // The thread's first query less its first key; those of others are a constant away.
    const int ahead = row + thread.lane() / 4 - 2 * (thread.lane() % 4);
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (8 * n + i % 2 - 16 * r - i / 2 * 8 > ahead) scores[r][n][i] = MinusInfinity();
        }
      }
    }
  }

  // Scores become exp(scale * (score - largest)); what was summed so far is scaled to the new
  // largest.
  template <class Thread>
  EBB_HOST_DEVICE static void Weigh(Thread& thread, float scale_log2, Softmax& softmax,
                                    Output& output, Scores& scores) {
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int half = 0; half < 2; ++half) {
        float largest = softmax.largest[r][half];
        const float before = largest;
        EBB_UNROLL
        for (int n = 0; n < kKeys / 8; ++n)
          largest = Larger(largest, Larger(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
        largest = Larger(largest, thread.ShuffleXor(largest, 1));
        largest = Larger(largest, thread.ShuffleXor(largest, 2));
        softmax.largest[r][half] = largest;
        const float offset = -largest * scale_log2;
        const float factor = Exp2(Fma(before, scale_log2, offset));
        float sum = softmax.sum[r][half] * factor;
        EBB_UNROLL
        for (int n = 0; n < kKeys / 8; ++n) {
          EBB_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[r][n][i] = Exp2(Fma(scores[r][n][i], scale_log2, offset));
            sum += scores[r][n][i];
          }
        }
        softmax.sum[r][half] = sum;
        EBB_UNROLL
        for (int n = 0; n < kDepth / 8; ++n) {
          output[r][n][2 * half] *= factor;
          output[r][n][2 * half + 1] *= factor;
        }
      }
    }
  }

  template <class Thread>
  EBB_HOST_DEVICE static void Store(Thread& thread, const Arrays& arrays, int head, int first,
                                    int warp_row, const Softmax& softmax, Output& output) {
    const HeadShape& shape = arrays.shape;
    const int group = thread.lane() / 4, pair = thread.lane() % 4;
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum = softmax.sum[r][half];
        sum += thread.ShuffleXor(sum, 1);
        sum += thread.ShuffleXor(sum, 2);
        const float share = 1 / sum;
        EBB_UNROLL
        for (int n = 0; n < kDepth / 8; ++n) {
          output[r][n][2 * half] *= share;
          output[r][n][2 * half + 1] *= share;
        }
        const int query = first + 16 * r + 8 * half + group;
        if (pair == 0 && query < shape.tokens) {
          arrays.log_sum_exp[int64_t{head} * shape.tokens + query] =
              Fma(softmax.largest[r][half], shape.scale, std::log(sum));
        }
      }
    }
    StoreRows<T, kDepth>(thread, output, 0, warp_row,
                         OutputOf(arrays.output, sizeof(T), head, shape), first, shape);
  }
};

}  // namespace ebb::gpt::cuda
