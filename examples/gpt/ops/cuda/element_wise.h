// Passes over the elements of activations, and sums of their columns. Each function enqueues on a
// stream of the current device and returns what CUDA says of the launch. `dtype` is that of the
// activations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Bytes an element: read 1, written 1.
cudaError_t LaunchGelu(cudaStream_t stream, DType dtype, const void* input, void* output,
                       int64_t count);
// The output again, and the gradient turned into the input's. Read 2, written 2.
cudaError_t LaunchGeluBackward(cudaStream_t stream, DType dtype, const void* input, void* output,
                               void* gradient, int64_t count);
// `sum` may be `a`. Read 2, written 1.
cudaError_t LaunchAdd(cudaStream_t stream, DType dtype, const void* a, const void* b, void* sum,
                      int64_t count);
// Over the rows, in two passes of a fixed order; the partial sums are fp32, [ColumnSumsParts,
// columns]. Read 1.
int64_t ColumnSumsParts(int64_t rows);
cudaError_t LaunchColumnSums(cudaStream_t stream, DType dtype, const void* matrix, int64_t rows,
                             int64_t columns, float* partials, const Target& sums);
// Loads all of them onto the current device, as their first launch would otherwise.
cudaError_t LoadElementWiseKernels(DType dtype);

}  // namespace ebb::gpt::cuda
