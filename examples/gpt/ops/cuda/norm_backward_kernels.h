// Layer norm, backward: kernels.h.
//
//   rows      | part 0 | part 1 | ... | part 0 | part 1 | ...        a block has a part of the rows
//   columns   | tile 0              | tile 1              | ...      and a tile of their columns
//
// With n the normalised input and g = weight * output gradient: input gradient = scale * (g -
// mean(g) - n * mean(g n)), so a block reads whole rows, but keeps and writes only its tile. Its
// threads have the same columns of every row, and sum them for the gradients of weight and bias.
// Rows of up to 12,288 16-bit or 6,144 fp32 numbers are one tile.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/block_sum.h"
#include "ops/cuda/norm_kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// Parts have at least 16 rows. An H200 runs two waves of the largest blocks, and one wave of blocks
// of 128 threads, three of them on each SM (146 registers for each thread): then 12 warps instead
// of 8 take turns at a row's barriers.
inline constexpr int64_t kNormPartsMax = 396;

inline int64_t NormParts(int64_t rows, int64_t most) {
  return std::clamp<int64_t>(Ceil(rows, 16), 1, most);
}

template <class T, int kWidth, int kRowThreads>
struct NormBackwardKernel {
  static constexpr int kThreads = kNormThreads<kRowThreads>;
  static constexpr int64_t kPartsMax = kThreads == 128 ? kNormPartsMax : 264;
  static constexpr int kRows = kThreads / kRowThreads;  // of a block at once
  static constexpr int kHeld = 3;                       // groups of a thread
  static constexpr int kTile = kHeld * kRowThreads * kWidth;
  static constexpr int kWarps = kThreads / kernel::kWarp;
  // Sums of a row, used in turn; at the end the sums for weight and bias.
  static constexpr size_t kSharedBytes =
      std::max(kRows > 1 ? 2 * kTile : 0, 2 * 2 * kWarps) * sizeof(float);

  struct Arrays {
    NormBackwardArrays norm;
    float* partials;  // [parts, 2, width]
    int64_t parts;
  };
  static int64_t Tiles(int64_t width) { return Ceil(width, kTile); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& arrays) {
    const NormBackwardArrays& a = arrays.norm;
    const int64_t part = thread.block() % arrays.parts;
    const int width = static_cast<int>(a.width);
    const int first = static_cast<int>(thread.block() / arrays.parts) * kTile +
                      thread.index() % kRowThreads * kWidth;
    float weight_sums[kHeld][kWidth] = {}, bias_sums[kHeld][kWidth] = {};
    auto* const shared = reinterpret_cast<float*>(thread.shared());
    int half = 0;  // of `shared`
    for (int64_t row = part * kRows + thread.index() / kRowThreads; row < a.rows;
         row += arrays.parts * kRows) {
      const int64_t begin = row * a.width;
      const float mean = a.mean[row], scale = a.reciprocal_deviation[row];
      Group<T, kWidth> inputs[kHeld], gradients[kHeld], residuals[kHeld];
      LoadTile(a.input, begin, first, width, inputs);
      LoadTile(a.output_gradient, begin, first, width, gradients);
      if (a.residual_gradient != nullptr)
        LoadTile(a.residual_gradient, begin, first, width, residuals);

      float sums[2] = {};  // of g, of g n
      EBB_UNROLL
      for (int h = 0; h < kHeld; ++h) {
        const int column = first + h * kStride;
        if (column >= width) break;
        const Terms terms(a, column, inputs[h], gradients[h], mean, scale);
        EBB_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          sums[0] += terms.g[i];
          sums[1] = std::fma(terms.g[i], terms.n[i], sums[1]);
          weight_sums[h][i] = std::fma(terms.dy[i], terms.n[i], weight_sums[h][i]);
          bias_sums[h][i] += terms.dy[i];
        }
      }
      if (width > kTile) AddOtherTiles(thread, a, begin, first, mean, scale, sums);
      SumOverThreads<kRowThreads>(thread, sums, shared + half * 2 * kWarps);
      half = 1 - half;

      const float mean_g = sums[0] / static_cast<float>(a.width);
      const float mean_gn = sums[1] / static_cast<float>(a.width);
      EBB_UNROLL
      for (int h = 0; h < kHeld; ++h) {
        const int column = first + h * kStride;
        if (column >= width) break;
        const Terms terms(a, column, inputs[h], gradients[h], mean, scale);
        float to[kWidth];
        EBB_UNROLL
        for (int i = 0; i < kWidth; ++i)
          to[i] = std::fma(-terms.n[i], mean_gn, terms.g[i] - mean_g) * scale;
        if (a.residual_gradient != nullptr) {
          float residual[kWidth];
          Unpack(residuals[h], residual);
          EBB_UNROLL
          for (int i = 0; i < kWidth; ++i) to[i] += residual[i];
        }
        Store(Pack<T>(to), a.input_gradient, begin + column);
      }
    }

    float* const partials = arrays.partials + part * 2 * a.width;
    if constexpr (kRows == 1) {
      EBB_UNROLL
      for (int h = 0; h < kHeld; ++h) {
        const int column = first + h * kStride;
        if (column >= width) break;
        StoreAnywhere<float>(weight_sums[h], partials, column);
        StoreAnywhere<float>(bias_sums[h], partials + a.width, column);
      }
    } else {
      AddWarps(thread, first, width, weight_sums, bias_sums, partials);
    }
  }

 private:
  static constexpr int kStride = kRowThreads * kWidth;

  struct Terms {
    float dy[kWidth], g[kWidth], n[kWidth];

    EBB_HOST_DEVICE Terms(const NormBackwardArrays& a, int column, const Group<T, kWidth>& input,
                          const Group<T, kWidth>& gradient, float mean, float scale) {
      Unpack(input, n);
      Unpack(gradient, dy);
      Unpack(Load<T, kWidth>(a.weight, column), g);
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        n[i] = (n[i] - mean) * scale;
        g[i] = g[i] * dy[i];
      }
    }
  };

  EBB_HOST_DEVICE static void LoadTile(const void* array, int64_t begin, int first, int width,
                                       Group<T, kWidth> (&groups)[kHeld]) {
    EBB_UNROLL
    for (int h = 0; h < kHeld; ++h) {
      const int column = first + h * kStride;
      if (column < width) groups[h] = Load<T, kWidth>(array, begin + column);
    }
  }

  template <class Thread>
  EBB_HOST_DEVICE static void AddOtherTiles(Thread& thread, const NormBackwardArrays& a,
                                            int64_t begin, int first, float mean, float scale,
                                            float (&sums)[2]) {
    for (int column = thread.index() % kRowThreads * kWidth; column < a.width; column += kStride) {
      if (column / kTile == first / kTile) continue;
      const Terms terms(a, column, Load<T, kWidth>(a.input, begin + column),
                        Load<T, kWidth>(a.output_gradient, begin + column), mean, scale);
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        sums[0] += terms.g[i];
        sums[1] = std::fma(terms.g[i], terms.n[i], sums[1]);
      }
    }
  }

  // Each of the block's warps had rows of its own: their sums are added in the order of the warps.
  template <class Thread>
  EBB_HOST_DEVICE static void AddWarps(Thread& thread, int first, int width,
                                       const float (&weight_sums)[kHeld][kWidth],
                                       const float (&bias_sums)[kHeld][kWidth], float* partials) {
    auto* const shared = reinterpret_cast<float*>(thread.shared());  // [2, tile]
    for (int warp = 0; warp < kWarps; ++warp) {
      thread.Sync();
      if (thread.warp() != warp) continue;
      EBB_UNROLL
      for (int h = 0; h < kHeld; ++h) {
        EBB_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const int at = (h * kernel::kWarp + thread.lane()) * kWidth + i;
          shared[at] = (warp == 0 ? 0.0f : shared[at]) + weight_sums[h][i];
          shared[kTile + at] = (warp == 0 ? 0.0f : shared[kTile + at]) + bias_sums[h][i];
        }
      }
    }
    thread.Sync();
    const int begin = first - thread.lane() * kWidth;
    for (int at = thread.index(); at < kTile && begin + at < width; at += kThreads) {
      partials[begin + at] = shared[at];
      partials[width + begin + at] = shared[kTile + at];
    }
  }
};

}  // namespace ebb::gpt::cuda
