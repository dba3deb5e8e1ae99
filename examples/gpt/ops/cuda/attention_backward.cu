#include <cuda_runtime.h>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_key_gradients.h"
#include "ops/cuda/attention_plain_backward.h"
#include "ops/cuda/attention_query_gradients.h"

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
  switch (TiledDepth(x.width / x.heads, x.qkv, x.output, x.output_gradient, x.qkv_gradient)) {
    case 64:
      return LaunchTiled<T, 64>(stream, x, scratch);
    case 128:
      return LaunchTiled<T, 128>(stream, x, scratch);
    default:
      return LaunchPlain<T>(stream, x, scratch);
  }
}

template <class T>
cudaError_t LoadPlainBackward() {
  return kernel::LoadKernels<PlainAttentionQueryGradients<T>, PlainAttentionKeyGradients<T>>();
}

template <class T>
cudaError_t LoadTiledBackward() {
  const cudaError_t result =
      kernel::LoadKernels<AttentionQueryGradients<T, 64>, AttentionQueryGradients<T, 128>,
                          AttentionKeyGradients<T, 64>, AttentionKeyGradients<T, 128>>();
  return result != cudaSuccess ? result : LoadPlainBackward<T>();
}

}  // namespace

cudaError_t LoadAttentionBackwardKernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return LoadPlainBackward<float>();
    case DType::kBFloat16:
      return LoadTiledBackward<BFloat16>();
    case DType::kFloat16:
      return LoadTiledBackward<Float16>();
    case DType::kInt8:
      break;
  }
  return cudaErrorInvalidValue;
}

int64_t AttentionScratchBytes(int64_t sequences, int64_t tokens, int64_t heads) {
  return sequences * tokens * heads * static_cast<int64_t>(sizeof(float));
}

cudaError_t LaunchAttentionBackward(cudaStream_t stream, DType dtype,
                                    const AttentionBackwardArrays& arrays, void* scratch) {
  if (arrays.sequences * arrays.tokens == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return LaunchPlain<float>(stream, arrays, scratch);
    case DType::kBFloat16:
      return LaunchOf<BFloat16>(stream, arrays, scratch);
    case DType::kFloat16:
      return LaunchOf<Float16>(stream, arrays, scratch);
    case DType::kInt8:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace ebb::gpt::cuda
