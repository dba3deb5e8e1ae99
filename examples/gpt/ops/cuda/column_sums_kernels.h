// Sums of columns in two passes: kernels.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// First pass: a block sums one part of the rows for 32 neighbouring groups of columns. Its warps
// take the rows in turn, and their sums are added in the order of the warps.
template <class T, int kWidth>
struct ColumnSumsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr int kColumns = kernel::kWarp * kWidth;  // of a block
  static constexpr int kMany = 4;                          // rows with loads in flight together
  static constexpr size_t kSharedBytes = kWarps * kColumns * sizeof(float);

  struct Arrays {
    const void* matrix;
    int64_t rows, columns;
    float* partials;  // [parts, columns]
    int64_t parts;
  };
  static int64_t Blocks(int64_t columns, int64_t parts) { return parts * Ceil(columns, kColumns); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t part = thread.block() % a.parts;
    const int64_t first_column = thread.block() / a.parts * kColumns;
    const int64_t end = a.rows * (part + 1) / a.parts;
    const int64_t column = first_column + thread.lane() * kWidth;
    float sums[kWidth] = {};
    if (column < a.columns) {
      for (int64_t row = a.rows * part / a.parts + thread.warp(); row < end;
           row += kMany * kWarps) {
        Group<T, kWidth> loaded[kMany];
        EBB_UNROLL
        for (int m = 0; m < kMany; ++m) {
          if (row + m * kWarps < end)
            loaded[m] = Load<T, kWidth>(a.matrix, (row + m * kWarps) * a.columns + column);
        }
        EBB_UNROLL
        for (int m = 0; m < kMany; ++m) {
          if (row + m * kWarps >= end) break;
          float numbers[kWidth];
          Unpack(loaded[m], numbers);
          EBB_UNROLL
          for (int i = 0; i < kWidth; ++i) sums[i] += numbers[i];
        }
      }
    }
    auto* const shared = reinterpret_cast<float*>(thread.shared());  // [warps, columns]
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i)
      shared[thread.warp() * kColumns + thread.lane() * kWidth + i] = sums[i];
    thread.Sync();
    for (int c = thread.index(); c < kColumns && first_column + c < a.columns; c += kThreads) {
      float sum = shared[c];
      for (int w = 1; w < kWarps; ++w) sum += shared[w * kColumns + c];
      a.partials[part * a.columns + first_column + c] = sum;
    }
  }
};

// Second pass: adds the parts of one or two targets, with as many threads for each column as there
// are warps.
struct AddPartsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr size_t kSharedBytes = kThreads * sizeof(float);

  struct Arrays {
    const float* partials;  // [parts, targets, columns]
    int64_t parts, columns;
    int targets_count;
    Target targets[2];
  };
  static int64_t Blocks(int64_t columns, int targets) {
    return targets * Ceil(columns, kernel::kWarp);
  }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t which = thread.block() % a.targets_count;
    const int64_t column = thread.block() / a.targets_count * kernel::kWarp + thread.lane();
    float sum = 0;
    if (column < a.columns) {
      for (int64_t part = thread.warp(); part < a.parts; part += kWarps)
        sum += a.partials[(part * a.targets_count + which) * a.columns + column];
    }
    auto* const shared = reinterpret_cast<float*>(thread.shared());  // [warps, 32]
    shared[thread.index()] = sum;
    thread.Sync();
    if (thread.warp() > 0 || column >= a.columns) return;
    float total[1] = {sum};
    for (int w = 1; w < kWarps; ++w) total[0] += shared[w * kernel::kWarp + thread.lane()];
    StoreTarget(total, which == 0 ? a.targets[0] : a.targets[1], column);
  }
};

// The second pass for the partial sums of one or two targets. element_wise.cu
cudaError_t LaunchAddParts(cudaStream_t stream, const AddPartsKernel::Arrays& arrays);

}  // namespace ebb::gpt::cuda
