// Layer norm: kernels.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/block_sum.h"
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

}  // namespace ebb::gpt::cuda
