#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/plain_product.h"
#include "ops/cuda/plain_product_kernel.h"

namespace ebb::gpt::cuda {

cudaError_t LaunchPlainProduct(cudaStream_t stream, DType dtype, const PlainProductArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using Kernel = PlainProductKernel<decltype(type)>;
    return kernel::LaunchKernel<Kernel>(
        stream, {.blocks = Kernel::Blocks(arrays), .shared_bytes = Kernel::kSharedBytes}, arrays);
  });
}

cudaError_t LoadPlainProductKernel(DType dtype) {
  return WithType(dtype, [](auto type) {
    return kernel::LoadKernels<PlainProductKernel<decltype(type)>>();
  });
}

}  // namespace ebb::gpt::cuda
