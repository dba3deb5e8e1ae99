#include <cuda_runtime.h>

#include <type_traits>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/attention_key_gradients.h"
#include "ops/cuda/attention_plain_backward.h"
#include "ops/cuda/attention_query_gradients.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {
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
