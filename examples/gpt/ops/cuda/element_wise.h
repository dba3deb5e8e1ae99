// Passes over the elements of activations, and sums of their columns. Each function enqueues on a
// stream of the current device and returns CUDA's error for the launch. `dtype` is that of the
// activations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Bytes for each element: read 1, written 1.
cudaError_t LaunchGelu(cudaStream_t stream, DType dtype, const void* input, void* output,
                       int64_t count);
// Computes the output again, and turns the gradient into the input's. Read 2, written 2.
cudaError_t LaunchGeluBackward(cudaStream_t stream, DType dtype, const void* input, void* output,
                               void* gradient, int64_t count);
// `sum` may be `a`. Read 2, written 1.
cudaError_t LaunchAdd(cudaStream_t stream, DType dtype, const void* a, const void* b, void* sum,
                      int64_t count);
// Sums over the rows, in two passes of a fixed order. The partial sums are fp32, [ColumnSumsParts,
// columns]. Read 1.
int64_t ColumnSumsParts(int64_t rows);
cudaError_t LaunchColumnSums(cudaStream_t stream, DType dtype, const void* matrix, int64_t rows,
                             int64_t columns, float* partials, const Target& sums);
// Loads all kernels onto the current device. Otherwise their first launch loads them.
cudaError_t LoadElementWiseKernels(DType dtype);

}  // namespace ebb::gpt::cuda
