// Attention without tensor cores, for fp32 and for calls that the tiled kernels do not take: any
// head width and alignment. All numbers are widened to fp32, and multiplied and added as such.
//
// A warp has kWarpRows rows of a head and walks over tiles of 32 other rows, one for each lane. Its
// sums have their columns spread over the lanes. Both kinds of rows go through shared memory, kSlab
// columns at a time: a wider head's scores are computed slab by slab, and again for every slab of
// the sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/attention_heads.h"

namespace ebb::gpt::cuda {

template <class T>
EBB_HOST_DEVICE float LoadNumber(const char* row, int column) {
  const T number = reinterpret_cast<const T*>(row)[column];
  if constexpr (std::is_same_v<T, float>) {
    return number;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return kernel::NumberOf(static_cast<uint32_t>(number.bits) << 16);
  } else {
    return kernel::FromFloat16(number.bits);
  }
}
template <class T>
EBB_HOST_DEVICE void StoreNumber(float value, char* row, int column) {
  T& number = reinterpret_cast<T*>(row)[column];
  if constexpr (std::is_same_v<T, float>) {
    number = value;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    number = BFloat16(value);
  } else {
    number.bits = kernel::ToFloat16(value);
  }
}

// The parts of plain kernels.
struct Plain {
  static constexpr int kWarps = 8, kThreads = kWarps * kernel::kWarp;
  static constexpr int kWarpRows = 4, kRows = kWarps * kWarpRows;  // of a block
  static constexpr int kTile = kernel::kWarp;                      // other rows
  static constexpr int kSlab = 128;                                // columns
  static constexpr int kLaneColumns = kSlab / kernel::kWarp;

  // Lanes read the block's rows together, and of a tile each lane reads its own row, in different
  // banks.
  using Rows = float[kRows][kSlab];
  using Tile = float[kTile][kSlab + 1];
  using Weights = float[kWarps][kTile][kWarpRows];  // of a lane's row for the warp's rows
  using OfRows = float[kWarpRows];
  using Sums = float[kWarpRows][kLaneColumns];

  static EBB_HOST_DEVICE int Slabs(int depth) { return (depth + kSlab - 1) / kSlab; }
  static EBB_HOST_DEVICE int Columns(int depth, int slab) {
    return depth - slab * kSlab < kSlab ? depth - slab * kSlab : kSlab;
  }

  // Rows [first, first + 32) of a head to shared memory, zeros past the last token.
  template <class T, class Thread, int kStride>
  EBB_HOST_DEVICE static void Load(Thread& thread, const HeadRows<const char>& rows, int first,
                                   int slab, const HeadShape& shape, float (&to)[kTile][kStride]) {
    static_assert(kRows == kTile);
    const int columns = Columns(shape.depth, slab);
    for (int row = thread.warp(); row < kTile; row += kWarps) {
      for (int c = thread.lane(); c < columns; c += kernel::kWarp) {
        to[row][c] =
            first + row < shape.tokens ? LoadNumber<T>(rows.Row(first + row), slab * kSlab + c) : 0;
      }
    }
  }

  // dots[i] += the warp's row i times the lane's row of the tile.
  template <class Thread>
  EBB_HOST_DEVICE static void AddDots(Thread& thread, const Rows& rows, const Tile& tile,
                                      int columns, OfRows& dots) {
    for (int c = 0; c < columns; ++c) {
      const float other = tile[thread.lane()][c];
      EBB_UNROLL
      for (int i = 0; i < kWarpRows; ++i)
        dots[i] = Fma(rows[thread.warp() * kWarpRows + i][c], other, dots[i]);
    }
  }
  // sums[i] += the lanes' weights of row i times their rows of the tile.
  template <class Thread>
  EBB_HOST_DEVICE static void AddWeighed(Thread& thread, const OfRows& weights, const Tile& tile,
                                         int columns, Weights& shared, Sums& sums) {
    auto& of_warp = shared[thread.warp()];
    thread.SyncWarp();
    EBB_UNROLL
    for (int i = 0; i < kWarpRows; ++i) of_warp[thread.lane()][i] = weights[i];
    thread.SyncWarp();
    for (int k = 0; k < kTile; ++k) {
      EBB_UNROLL
      for (int e = 0; e < kLaneColumns; ++e) {
        const int column = thread.lane() + e * kernel::kWarp;
        const float other = column < columns ? tile[k][column] : 0;
        EBB_UNROLL
        for (int i = 0; i < kWarpRows; ++i) sums[i][e] = Fma(of_warp[k][i], other, sums[i][e]);
      }
    }
  }

  // The warp's rows of a slab, times factors[i].
  template <class T, class Thread>
  EBB_HOST_DEVICE static void Store(Thread& thread, const Sums& sums, const OfRows& factors,
                                    const HeadRows<char>& rows, int first, int slab,
                                    const HeadShape& shape) {
    for (int i = 0; i < kWarpRows; ++i) {
      const int row = first + thread.warp() * kWarpRows + i;
      if (row >= shape.tokens) continue;
      for (int e = 0; e < kLaneColumns; ++e) {
        const int column = thread.lane() + e * kernel::kWarp;
        if (column < Columns(shape.depth, slab))
          StoreNumber<T>(sums[i][e] * factors[i], rows.Row(row), slab * kSlab + column);
      }
    }
  }
};

template <class T>
struct PlainAttentionForward : Plain {
  using Arrays = AttentionWork;
  struct Shared {
    Weights weights;
    Rows queries;
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
    const int slabs = Slabs(shape.depth);

    for (int slab = 0; slab < slabs; ++slab) {
      const int columns = Columns(shape.depth, slab);
      OfRows largest, sum;  // the sum over this lane's keys
      Sums sums;
      for (int i = 0; i < kWarpRows; ++i) {
        largest[i] = MinusInfinity(), sum[i] = 0;
        for (int e = 0; e < kLaneColumns; ++e) sums[i][e] = 0;
      }
      for (int tile = 0; tile < first + kRows && tile < shape.tokens; tile += kTile) {
        OfRows scores = {};
        for (int s = 0; s < slabs; ++s) {
          thread.Sync();
          Load<T>(thread, queries, first, s, shape, shared.queries);
          Load<T>(thread, keys, tile, s, shape, shared.keys);
          if (s == 0) Load<T>(thread, values, tile, slab, shape, shared.values);
          thread.Sync();
          AddDots(thread, shared.queries, shared.keys, Columns(shape.depth, s), scores);
        }
        for (int i = 0; i < kWarpRows; ++i) {
          const int query = first + thread.warp() * kWarpRows + i;
          if (tile + thread.lane() > query) scores[i] = MinusInfinity();
          const float before = largest[i];
          largest[i] = Larger(before, kernel::WarpMax(thread, scores[i]));
          const float offset = -largest[i] * shape.scale_log2;
          const float factor = Exp2(Fma(before, shape.scale_log2, offset));
          scores[i] = Exp2(Fma(scores[i], shape.scale_log2, offset));
          sum[i] = sum[i] * factor + scores[i];
          for (int e = 0; e < kLaneColumns; ++e) sums[i][e] *= factor;
        }
        AddWeighed(thread, scores, shared.values, columns, shared.weights, sums);
      }
      OfRows shares;
      for (int i = 0; i < kWarpRows; ++i) {
        const float total = kernel::WarpSum(thread, sum[i]);
        shares[i] = 1 / total;
        const int query = first + thread.warp() * kWarpRows + i;
        if (slab == 0 && thread.lane() == 0 && query < shape.tokens) {
          arrays.log_sum_exp[int64_t{place.head} * shape.tokens + query] =
              Fma(largest[i], shape.scale, std::log(total));
        }
      }
      Store<T>(thread, sums, shares, OutputOf(arrays.output, sizeof(T), place.head, shape), first,
               slab, shape);
    }
  }
};

// The backward pass, in two halves as on tensor cores: first the gradients of
// queries, which also leaves the row dots, and then those of keys and values. A warp has rows of
// one kind, and each lane a row of the other.
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
