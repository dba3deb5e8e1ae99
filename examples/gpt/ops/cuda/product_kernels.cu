#include <algorithm>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/product_kernels.h"

namespace ebb::gpt::cuda {

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
