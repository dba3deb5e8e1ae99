// The embedding and its gradient. Each function enqueues on a stream of the current device and
// returns what CUDA says of the launch. `dtype` is that of the activations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Bytes an element: read 2, written 1.
cudaError_t LaunchEmbed(cudaStream_t stream, DType dtype, const EmbedArrays& arrays);
// Without atomics and without the host: the rows are sorted by their ids on the device, then every
// row of a table sums its own. The gradient is read twice, once for each table; the tables' are
// written once. `sorted`: EmbedBackwardInts numbers.
int64_t EmbedBackwardInts(int64_t rows, int64_t vocabulary);
cudaError_t LaunchEmbedBackward(cudaStream_t stream, DType dtype, const EmbedBackwardArrays& arrays,
                                int32_t* sorted);
cudaError_t LoadEmbeddingKernels(DType dtype);

}  // namespace ebb::gpt::cuda
