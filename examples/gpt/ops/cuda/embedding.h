// The embedding and its gradient. Each function enqueues on a stream of the current device and
// returns CUDA's error for the launch. `dtype` is that of the activations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Bytes for each element: read 2, written 1.
cudaError_t LaunchEmbed(cudaStream_t stream, DType dtype, const EmbedArrays& arrays);
// Uses neither atomics nor the host: the device sorts the rows by their ids, and then every row of
// a table sums its own. The gradient is read twice, once for each table. The tables' gradients are
// written once. `sorted`: EmbedBackwardInts numbers.
int64_t EmbedBackwardInts(int64_t rows, int64_t vocabulary);
cudaError_t LaunchEmbedBackward(cudaStream_t stream, DType dtype, const EmbedBackwardArrays& arrays,
                                int32_t* sorted);
cudaError_t LoadEmbeddingKernels(DType dtype);

}  // namespace ebb::gpt::cuda
