// Layer norm: kernels.h.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

inline constexpr float kNormEpsilon = 1e-5f;

// A row belongs to a warp, or to a whole block.
template <int kRowThreads>
inline constexpr int kNormThreads = kRowThreads == kernel::kWarp ? 256 : kRowThreads;

// A thread of a row has the row's groups `first`, first + kRowThreads, ... It keeps kHeld of them
// in registers between the passes over the row, and loads further groups, which wider rows have,
// again in each pass.
template <class T, int kWidth, int kRowThreads>
struct NormKernel {
  static constexpr int kThreads = kNormThreads<kRowThreads>;
  static constexpr int kHeld = 4;
  static constexpr int kColumnsHeld = kHeld * kRowThreads * kWidth;
  static constexpr size_t kSharedBytes = 2 * kThreads / kernel::kWarp * sizeof(float);
  using Arrays = NormArrays;
  using Numbers = Group<T, kWidth>;

  static int64_t Blocks(int64_t rows) { return Ceil(rows, kThreads / kRowThreads); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t row = thread.block() * (kThreads / kRowThreads) + thread.index() / kRowThreads;
    if (row >= a.rows) return;  // all threads of the row
    const Row r = {.begin = row * a.width,
                   .first = thread.index() % kRowThreads * kWidth,
                   .width = static_cast<int>(a.width)};
    Numbers held[kHeld];
    LoadHeld(a.input, r, held);
    const void* x = a.input;
    if (a.residual != nullptr) {
      AddResidual(a, r, held);
      x = a.sum;  // statistics of the stored sum, which backward reads
    }

    auto* const shared = reinterpret_cast<float*>(thread.shared());
    float sum[1] = {};
    Each(x, r, held, [&](const float(&numbers)[kWidth], int) {
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i) sum[0] += numbers[i];
    });
    SumOverThreads<kRowThreads>(thread, sum, shared);
    const float mean = sum[0] / static_cast<float>(a.width);
    float squares[1] = {};
    Each(x, r, held, [&](const float(&numbers)[kWidth], int) {
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i)
        squares[0] = std::fma(numbers[i] - mean, numbers[i] - mean, squares[0]);
    });
    SumOverThreads<kRowThreads>(thread, squares, shared + kThreads / kernel::kWarp);
    const float scale = 1.0f / std::sqrt(squares[0] / static_cast<float>(a.width) + kNormEpsilon);
    if (r.first == 0) {
      a.mean[row] = mean;
      a.reciprocal_deviation[row] = scale;
    }
    Each(x, r, held, [&](float(&numbers)[kWidth], int column) {
      float weight[kWidth], bias[kWidth];
      Unpack(Load<T, kWidth>(a.weight, column), weight);
      Unpack(Load<T, kWidth>(a.bias, column), bias);
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i)
        numbers[i] = std::fma((numbers[i] - mean) * scale, weight[i], bias[i]);
      Store(Pack<T>(numbers), a.output, r.begin + column);
    });
  }

 private:
  static constexpr int kStride = kRowThreads * kWidth;
  struct Row {
    int64_t begin;
    int first, width;
  };

  EBB_HOST_DEVICE static void LoadHeld(const void* array, const Row& r, Numbers (&held)[kHeld]) {
    EBB_UNROLL
    for (int h = 0; h < kHeld; ++h) {
      const int column = r.first + h * kStride;
      if (column < r.width) held[h] = Load<T, kWidth>(array, r.begin + column);
    }
  }

  // Calls body(numbers, column) for the thread's groups.
  template <class Body>
  EBB_HOST_DEVICE static void Each(const void* array, const Row& r, const Numbers (&held)[kHeld],
                                   const Body& body) {
    float numbers[kWidth];
    EBB_UNROLL
    for (int h = 0; h < kHeld; ++h) {
      const int column = r.first + h * kStride;
      if (column >= r.width) break;
      Unpack(held[h], numbers);
      body(numbers, column);
    }
    for (int column = r.first + kHeld * kStride; column < r.width; column += kStride) {
      Unpack(Load<T, kWidth>(array, r.begin + column), numbers);
      body(numbers, column);
    }
  }

  EBB_HOST_DEVICE static void AddResidual(const Arrays& a, const Row& r, Numbers (&held)[kHeld]) {
    Numbers residual[kHeld];
    LoadHeld(a.residual, r, residual);
    EBB_UNROLL
    for (int h = 0; h < kHeld; ++h) {
      const int column = r.first + h * kStride;
      if (column >= r.width) break;
      held[h] = Sum(held[h], residual[h]);
      Store(held[h], a.sum, r.begin + column);
    }
    for (int column = r.first + kHeld * kStride; column < r.width; column += kStride) {
      const int64_t at = r.begin + column;
      Store(Sum(Load<T, kWidth>(a.input, at), Load<T, kWidth>(a.residual, at)), a.sum, at);
    }
  }
  EBB_HOST_DEVICE static Numbers Sum(const Numbers& a, const Numbers& b) {
    float sum[kWidth], added[kWidth];
    Unpack(a, sum);
    Unpack(b, added);
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i) sum[i] += added[i];
    return Pack<T>(sum);
  }
};

// Backward.
//
//   rows      | part 0 | part 1 | ... | part 0 | part 1 | ...        a block has a part of the rows
//   columns   | tile 0              | tile 1              | ...      and a tile of their columns
//
// With n the normalised input and g = weight * output gradient: input gradient = scale * (g -
// mean(g) - n * mean(g n)), so a block reads whole rows, but keeps and writes only its tile. Its
// threads have the same columns of every row, and sum them for the gradients of weight and bias.
// Rows of up to 12,288 16-bit or 6,144 fp32 numbers are one tile.

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

using kernel::kWarp;

cudaError_t LaunchNorm(cudaStream_t stream, DType dtype, const NormArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(
          stream, {.blocks = Kernel::Blocks(arrays.rows), .shared_bytes = Kernel::kSharedBytes},
          arrays);
    };
    using OfWarp = NormKernel<T, kGroup<T>, kWarp>;
    using OfFourWarps = NormKernel<T, kGroup<T>, 4 * kWarp>;
    if (!RowsAreAligned<T>(arrays.width, {arrays.input, arrays.residual, arrays.sum, arrays.weight,
                                          arrays.bias, arrays.output}))
      return launch(NormKernel<T, 1, 512>());
    if (arrays.width <= OfWarp::kColumnsHeld) return launch(OfWarp());
    return arrays.width <= OfFourWarps::kColumnsHeld ? launch(OfFourWarps())
                                                     : launch(NormKernel<T, kGroup<T>, 512>());
  });
}

int64_t NormBackwardPartials(int64_t rows, int64_t width) {
  return NormParts(rows, kNormPartsMax) * 2 * width;
}

cudaError_t LaunchNormBackward(cudaStream_t stream, DType dtype, const NormBackwardArrays& arrays,
                               float* partials) {
  int64_t parts = 0;
  const cudaError_t result = WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      parts = NormParts(arrays.rows, Kernel::kPartsMax);
      return kernel::LaunchKernel<Kernel>(
          stream,
          {.blocks = parts * Kernel::Tiles(arrays.width), .shared_bytes = Kernel::kSharedBytes},
          {.norm = arrays, .partials = partials, .parts = parts});
    };
    using OfWarp = NormBackwardKernel<T, kGroup<T>, kWarp>;
    using OfFourWarps = NormBackwardKernel<T, kGroup<T>, 4 * kWarp>;
    if (!RowsAreAligned<T>(arrays.width, {arrays.input, arrays.weight, arrays.output_gradient,
                                          arrays.residual_gradient, arrays.input_gradient}))
      return launch(NormBackwardKernel<T, 1, 512>());
    if (arrays.width <= OfWarp::kTile) return launch(OfWarp());
    return arrays.width <= OfFourWarps::kTile ? launch(OfFourWarps())
                                              : launch(NormBackwardKernel<T, kGroup<T>, 512>());
  });
  if (result != cudaSuccess) return result;
  return LaunchAddParts(stream, {.partials = partials,
                                 .parts = parts,
                                 .columns = arrays.width,
                                 .targets_count = 2,
                                 .targets = {arrays.weight_gradient, arrays.bias_gradient}});
}

cudaError_t LoadNormKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<
        NormKernel<T, kGroup<T>, kWarp>, NormKernel<T, kGroup<T>, 4 * kWarp>,
        NormKernel<T, kGroup<T>, 512>, NormKernel<T, 1, 512>,
        NormBackwardKernel<T, kGroup<T>, kWarp>, NormBackwardKernel<T, kGroup<T>, 4 * kWarp>,
        NormBackwardKernel<T, kGroup<T>, 512>, NormBackwardKernel<T, 1, 512>>();
  });
}

}  // namespace ebb::gpt::cuda
