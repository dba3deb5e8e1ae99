// The second pass of sums over rows: the partial sums of one or two targets, added in a fixed
// order. Enqueues on a stream of the current device and returns CUDA's error for the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/column_sums_kernels.h"

namespace ebb::gpt::cuda {

cudaError_t LaunchAddParts(cudaStream_t stream, const AddPartsKernel::Arrays& arrays);

}  // namespace ebb::gpt::cuda
