// The first half of attention's backward pass on tensor cores: gradients of queries.
//
//   scores = queries keys^T           weights = exp(scale * scores - log_sum_exp)
//   weight_gradients = output_gradients values^T
//   score_gradients = weights * (weight_gradients - row_dots)
//   query_gradients = scale * score_gradients keys
//
// It also leaves row_dots, output . output_gradient of each query, for the second half.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_plain.h"
#include "ops/cuda/attention_tiles.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

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

// The second half of attention's backward pass on tensor cores: gradients of keys and values. A
// block has kKeys keys and values of a head and walks over the queries that see them. It is
// the first half transposed, so that a warp's sums are for its own keys only:
//
//   scores^T = keys queries^T         weights = exp(scale * scores - log_sum_exp)
//   value_gradients = weights^T output_gradients
//   weight_gradients^T = values output_gradients^T
//   score_gradients = weights * (weight_gradients - row_dots)
//   key_gradients = scale * score_gradients^T queries
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

namespace {

template <class Kernel>
cudaError_t Launch(cudaStream_t stream, int64_t bytes, int64_t tile_rows,
                   const AttentionBackwardArrays& x, void* scratch) {
  const HeadShape shape = ShapeOf(x.sequences, x.tokens, x.heads, x.width, bytes, tile_rows);
  return kernel::LaunchKernel<Kernel>(
      stream, {.blocks = shape.head_count() * shape.tiles, .shared_bytes = Kernel::kSharedBytes},
      {.shape = shape,
       .qkv = static_cast<const char*>(x.qkv),
       .output = static_cast<const char*>(x.output),
       .output_gradient = static_cast<const char*>(x.output_gradient),
       .log_sum_exp = x.log_sum_exp,
       .row_dots = static_cast<float*>(scratch),
       .qkv_gradient = static_cast<char*>(x.qkv_gradient)});
}

template <class T, int kDepth>
cudaError_t LaunchTiled(cudaStream_t stream, const AttentionBackwardArrays& x, void* scratch) {
  using Queries = AttentionQueryGradients<T, kDepth>;
  using Keys = AttentionKeyGradients<T, kDepth>;
  const cudaError_t result = Launch<Queries>(stream, sizeof(T), Queries::kQueries, x, scratch);
  return result != cudaSuccess ? result : Launch<Keys>(stream, sizeof(T), Keys::kKeys, x, scratch);
}

template <class T>
cudaError_t LaunchPlain(cudaStream_t stream, const AttentionBackwardArrays& x, void* scratch) {
  using Queries = PlainAttentionQueryGradients<T>;
  using Keys = PlainAttentionKeyGradients<T>;
  const cudaError_t result = Launch<Queries>(stream, sizeof(T), Plain::kRows, x, scratch);
  return result != cudaSuccess ? result : Launch<Keys>(stream, sizeof(T), Plain::kRows, x, scratch);
}

template <class T>
cudaError_t LaunchOf(cudaStream_t stream, const AttentionBackwardArrays& x, void* scratch) {
  if constexpr (!std::is_same_v<T, float>) {
    switch (TiledDepth(x.width / x.heads, x.qkv, x.output, x.output_gradient, x.qkv_gradient)) {
      case 64:
        return LaunchTiled<T, 64>(stream, x, scratch);
      case 128:
        return LaunchTiled<T, 128>(stream, x, scratch);
      default:
        break;
    }
  }
  return LaunchPlain<T>(stream, x, scratch);
}

}  // namespace

cudaError_t LoadAttentionBackwardKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    using Queries = PlainAttentionQueryGradients<T>;
    using Keys = PlainAttentionKeyGradients<T>;
    if constexpr (std::is_same_v<T, float>) {
      return kernel::LoadKernels<Queries, Keys>();
    } else {
      return kernel::LoadKernels<AttentionQueryGradients<T, 64>, AttentionQueryGradients<T, 128>,
                                 AttentionKeyGradients<T, 64>, AttentionKeyGradients<T, 128>,
                                 Queries, Keys>();
    }
  });
}

int64_t AttentionScratchBytes(int64_t sequences, int64_t tokens, int64_t heads) {
  return sequences * tokens * heads * static_cast<int64_t>(sizeof(float));
}

cudaError_t LaunchAttentionBackward(cudaStream_t stream, DType dtype,
                                    const AttentionBackwardArrays& arrays, void* scratch) {
  if (arrays.sequences * arrays.tokens == 0) return cudaSuccess;
  return WithType(dtype,
                  [&](auto type) { return LaunchOf<decltype(type)>(stream, arrays, scratch); });
}

}  // namespace ebb::gpt::cuda
