#include <cuda_runtime.h>

#include <type_traits>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/attention_forward.h"
#include "ops/cuda/attention_plain.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {
namespace {

template <class Kernel>
cudaError_t Launch(cudaStream_t stream, int64_t bytes, int64_t tile_rows,
                   const AttentionArrays& x) {
  const HeadShape shape = ShapeOf(x.sequences, x.tokens, x.heads, x.width, bytes, tile_rows);
  return kernel::LaunchKernel<Kernel>(
      stream, {.blocks = shape.head_count() * shape.tiles, .shared_bytes = Kernel::kSharedBytes},
      {.shape = shape,
       .qkv = static_cast<const char*>(x.qkv),
       .output = static_cast<char*>(x.output),
       .log_sum_exp = x.log_sum_exp});
}

template <class T, int kDepth>
cudaError_t LaunchTiled(cudaStream_t stream, const AttentionArrays& x) {
  using Kernel = AttentionForward<T, kDepth>;
  return Launch<Kernel>(stream, sizeof(T), Kernel::kQueries, x);
}

template <class T>
cudaError_t LaunchPlain(cudaStream_t stream, const AttentionArrays& x) {
  return Launch<PlainAttentionForward<T>>(stream, sizeof(T), Plain::kRows, x);
}

template <class T>
cudaError_t LaunchOf(cudaStream_t stream, const AttentionArrays& x) {
  if constexpr (!std::is_same_v<T, float>) {
    switch (TiledDepth(x.width / x.heads, x.qkv, x.output)) {
      case 64:
        return LaunchTiled<T, 64>(stream, x);
      case 128:
        return LaunchTiled<T, 128>(stream, x);
      default:
        break;
    }
  }
  return LaunchPlain<T>(stream, x);
}

}  // namespace

cudaError_t LoadAttentionKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, float>) {
      return kernel::LoadKernels<PlainAttentionForward<T>>();
    } else {
      return kernel::LoadKernels<AttentionForward<T, 64>, AttentionForward<T, 128>,
                                 PlainAttentionForward<T>>();
    }
  });
}

cudaError_t LaunchAttention(cudaStream_t stream, DType dtype, const AttentionArrays& arrays) {
  if (arrays.sequences * arrays.tokens == 0) return cudaSuccess;
  return WithType(dtype, [&](auto type) { return LaunchOf<decltype(type)>(stream, arrays); });
}

}  // namespace ebb::gpt::cuda
