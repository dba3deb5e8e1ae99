// The reduction kernels as the host sees them. Nothing else of reduce.cu is named elsewhere, so
// whoever defines these functions takes its place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/config/dtype.h"

namespace ebb {

// A Reduction and its arrays, as they travel in a kernel's parameters.
struct ReduceArrays {
  static constexpr int kInputsMax = 64;  // that need no stride
  enum class Combine : uint8_t { kSum, kMax, kMin };

  const void* inputs[kInputsMax] = {};
  void* destination = nullptr;  // one of the inputs, or overlaps none
  // Bytes from one input to the next, a multiple of 16: they all lie in a row behind inputs[0].
  int64_t stride = 0;
  int64_t count = 0;  // elements
  int inputs_count = 0;
  int group = 1;  // inputs; divides their number
  float scale = 1;
  DType dtype = DType::kFloat32;
  Combine combine = Combine::kSum;
};

// Sums that another has made, each to be multiplied where it lies: in fp32, then rounded once.
struct ScaleArrays {
  static constexpr int kSpansMax = 64;
  struct Span {
    void* data = nullptr;
    int64_t count = 0;  // elements
  };

  Span spans[kSpansMax] = {};
  int spans_count = 0;
  float factor = 1;
  DType dtype = DType::kFloat32;
};

// The largest grids of one device, in blocks of threads (resident_blocks.h): of a DType and a
// Combine; of a DType.
struct ReduceGrids {
  int blocks[4][3] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
  int scale[4] = {1, 1, 1, 1};

  int Of(const ReduceArrays& arrays) const {
    return blocks[static_cast<int>(arrays.dtype)][static_cast<int>(arrays.combine)];
  }
};

// Loads the kernels of all types onto the current device. An error where it is older than what this
// build has code for.
cudaError_t LoadReductions(ReduceGrids* grids);

// Enqueues one on a stream of the current device, of which `grids` are. What CUDA says of the
// launch, and nothing of what was enqueued before.
cudaError_t LaunchReduce(const ReduceGrids& grids, cudaStream_t stream, const ReduceArrays& arrays);
cudaError_t LaunchScale(const ReduceGrids& grids, cudaStream_t stream, const ScaleArrays& arrays);

}  // namespace ebb
