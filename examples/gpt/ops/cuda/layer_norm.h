// Layer norm. Each function enqueues on a stream of the current device and returns CUDA's error for
// the launch. `dtype` is that of the activations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Bytes for each element: read 1, written 1; with a residual 2 and 2.
cudaError_t LaunchNorm(cudaStream_t stream, DType dtype, const NormArrays& arrays);
// All gradients in one pass: read 2, written 1, a residual's gradient 1 more. Sums over rows are
// made in parts of a fixed order, which a second kernel adds. `partials`: NormBackwardPartials
// numbers.
int64_t NormBackwardPartials(int64_t rows, int64_t width);
cudaError_t LaunchNormBackward(cudaStream_t stream, DType dtype, const NormBackwardArrays& arrays,
                               float* partials);
cudaError_t LoadNormKernels(DType dtype);

}  // namespace ebb::gpt::cuda
