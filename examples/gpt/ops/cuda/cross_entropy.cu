#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/cross_entropy_kernels.h"
#include "ops/cuda/kernels.h"

namespace ebb::gpt::cuda {

cudaError_t LaunchCrossEntropy(cudaStream_t stream, DType dtype, const CrossEntropyArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using Kernel = CrossEntropyKernel<decltype(type)>;
    return kernel::LaunchKernel<Kernel>(
        stream, {.blocks = arrays.rows, .shared_bytes = Kernel::kSharedBytes}, arrays);
  });
}

cudaError_t LaunchMean(cudaStream_t stream, const float* numbers, int64_t count, float* mean) {
  return kernel::LaunchKernel<MeanKernel>(stream,
                                          {.blocks = 1, .shared_bytes = MeanKernel::kSharedBytes},
                                          {.numbers = numbers, .count = count, .mean = mean});
}

cudaError_t LoadCrossEntropyKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    return kernel::LoadKernels<CrossEntropyKernel<decltype(type)>, MeanKernel>();
  });
}

}  // namespace ebb::gpt::cuda
