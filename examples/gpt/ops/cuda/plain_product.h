// A product of matrices of any strides and alignments, for those without an algorithm in cuBLASLt.
// It has a hundredth of cuBLASLt's speed, and always works.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/config/dtype.h"

namespace ebb::gpt::cuda {

// Element (i, d) of a [m, k] is at i * a_row + d * a_depth, element (d, j) of b [k, n] at d *
// b_depth + j * b_column; c [m, n] is fp32 and contiguous.
struct PlainProductArrays {
  const void *a = nullptr, *b = nullptr;
  float* c = nullptr;
  int64_t m = 0, n = 0, k = 0;
  int64_t a_row = 0, a_depth = 0, b_depth = 0, b_column = 0;
};

// c = a b, each sum in ascending order of depth by fused multiply-adds in fp32. `dtype`: of a and
// b. Enqueues on a stream of the current device and returns CUDA's error for the launch.
cudaError_t LaunchPlainProduct(cudaStream_t stream, DType dtype, const PlainProductArrays& arrays);

// Loads the kernel onto the current device. Otherwise its first launch loads it.
cudaError_t LoadPlainProductKernel(DType dtype);

}  // namespace ebb::gpt::cuda
