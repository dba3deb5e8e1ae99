// The kernels of products beside cuBLASLt's: kernels.h.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// A block computes a tile of c. It walks along the depth, with a tile of a and one of b in shared
// memory at a time.
template <class T>
struct PlainProductKernel {
  static constexpr int kTile = 16, kThreads = kTile * kTile;
  static constexpr int kStride = kTile + 1;  // of a tile's rows, in different banks
  static constexpr size_t kSharedBytes = 2 * kTile * kStride * sizeof(float);
  using Arrays = PlainProductArrays;

  static int64_t Blocks(const Arrays& x) { return Ceil(x.m, kTile) * Ceil(x.n, kTile); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& x) {
    auto* const a_tile = reinterpret_cast<float*>(thread.shared());
    float* const b_tile = a_tile + kTile * kStride;
    const int64_t tiles = (x.n + kTile - 1) / kTile;
    const int64_t first_row = thread.block() / tiles * kTile;
    const int64_t first_column = thread.block() % tiles * kTile;
    const int of_row = thread.index() / kTile, of_column = thread.index() % kTile;
    const int64_t row = first_row + of_row, column = first_column + of_column;
    float sum = 0;
    for (int64_t depth = 0; depth < x.k; depth += kTile) {
      a_tile[of_row * kStride + of_column] =
          row < x.m && depth + of_column < x.k
              ? At(x.a, row * x.a_row + (depth + of_column) * x.a_depth)
              : 0.0f;
      b_tile[of_row * kStride + of_column] =
          column < x.n && depth + of_row < x.k
              ? At(x.b, (depth + of_row) * x.b_depth + column * x.b_column)
              : 0.0f;
      thread.Sync();
      const int count = x.k - depth < kTile ? static_cast<int>(x.k - depth) : kTile;
      for (int d = 0; d < count; ++d)
        sum = std::fma(a_tile[of_row * kStride + d], b_tile[d * kStride + of_column], sum);
      thread.Sync();
    }
    if (row < x.m && column < x.n) x.c[row * x.n + column] = sum;
  }

 private:
  EBB_HOST_DEVICE static float At(const void* array, int64_t index) {
    float number[1];
    Unpack(Load<T, 1>(array, index), number);
    return number[0];
  }
};

struct StoreKernel {
  static constexpr int kThreads = 256;
  struct Arrays {
    const float* source;
    int64_t rows, columns;
    const void* bias;  // one for each column, or null
    DType bias_dtype;
    Target target;
  };

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t count = a.rows * a.columns;
    for (int64_t i = thread.block() * kThreads + thread.index(); i < count;
         i += thread.blocks() * kThreads) {
      float sum[1] = {a.source[i]};
      if (a.bias != nullptr) sum[0] = sum[0] + NumberAt(a.bias, a.bias_dtype, i % a.columns);
      if (a.target.beta != 0) sum[0] = sum[0] + NumberAt(a.target.data, a.target.dtype, i);
      kernel::Store(kernel::Pack(sum, a.target.dtype), a.target.data, SizeOf(a.target.dtype), i);
    }
  }

 private:
  EBB_HOST_DEVICE static float NumberAt(const void* array, DType dtype, int64_t index) {
    float number[1];
    kernel::Unpack(kernel::Load<1>(array, SizeOf(dtype), index), dtype, number);
    return number[0];
  }
};

cudaError_t LaunchPlainProduct(cudaStream_t stream, DType dtype, const PlainProductArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using Kernel = PlainProductKernel<decltype(type)>;
    return kernel::LaunchKernel<Kernel>(
        stream, {.blocks = Kernel::Blocks(arrays), .shared_bytes = Kernel::kSharedBytes}, arrays);
  });
}

cudaError_t LaunchStore(cudaStream_t stream, const float* source, int64_t rows, int64_t columns,
                        const void* bias, DType bias_dtype, const Target& target) {
  constexpr int64_t kBlocksMax = 2048;
  const int64_t blocks = Ceil(rows * columns, StoreKernel::kThreads);
  return kernel::LaunchKernel<StoreKernel>(stream, {.blocks = std::min(blocks, kBlocksMax)},
                                           {source, rows, columns, bias, bias_dtype, target});
}

cudaError_t LoadProductKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    return kernel::LoadKernels<PlainProductKernel<decltype(type)>, StoreKernel>();
  });
}

}  // namespace ebb::gpt::cuda
