// Cross-entropy and the mean of its losses. Each function enqueues on a stream of the current
// device and returns CUDA's error for the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// `dtype`: of the logits and the gradient. Bytes for each element: read 1 from memory (and again
// from the cache, for the gradient), written 1.
cudaError_t LaunchCrossEntropy(cudaStream_t stream, DType dtype, const CrossEntropyArrays& arrays);
// Adds in a fixed order.
cudaError_t LaunchMean(cudaStream_t stream, const float* numbers, int64_t count, float* mean);
cudaError_t LoadCrossEntropyKernels(DType dtype);

}  // namespace ebb::gpt::cuda
