// Stores fp32 results of a product to their target.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// target = beta * target + source + bias, [rows, columns]; `bias` of `bias_dtype`, one for each
// column, or null. Enqueues on a stream of the current device and returns CUDA's error for the
// launch. Bytes for each element: read 4, and the target's written.
cudaError_t LaunchStore(cudaStream_t stream, const float* source, int64_t rows, int64_t columns,
                        const void* bias, DType bias_dtype, const Target& target);

// Loads the kernel onto the current device. Otherwise its first launch loads it.
cudaError_t LoadStoreKernel();

}  // namespace ebb::gpt::cuda
