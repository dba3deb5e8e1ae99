#include <algorithm>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/store.h"
#include "ops/cuda/store_kernel.h"

namespace ebb::gpt::cuda {

cudaError_t LaunchStore(cudaStream_t stream, const float* source, int64_t rows, int64_t columns,
                        const void* bias, DType bias_dtype, const Target& target) {
  constexpr int64_t kBlocksMax = 2048;
  const int64_t blocks = (rows * columns + StoreKernel::kThreads - 1) / StoreKernel::kThreads;
  return kernel::LaunchKernel<StoreKernel>(stream, {.blocks = std::min(blocks, kBlocksMax)},
                                           {source, rows, columns, bias, bias_dtype, target});
}

cudaError_t LoadStoreKernel() {
  return kernel::LoadKernels<StoreKernel>();
}

}  // namespace ebb::gpt::cuda
