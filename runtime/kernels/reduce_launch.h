// The reduction kernels as the host calls them. A test that defines these functions replaces
// reduce.cu, because nothing else of reduce.cu is named elsewhere.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/base/dtype.h"

namespace ebb {

// A Reduction and its arrays, as passed in a kernel's parameters.
struct ReduceArrays {
  static constexpr int kInputsMax = 64;  // inputs without a stride
  enum class Combine : uint8_t { kSum, kMax, kMin };

  const void* inputs[kInputsMax] = {};
  void* destination = nullptr;  // one of the inputs, or overlaps none
  // Bytes from one input to the next, a multiple of 16. The inputs lie in a row, and inputs[0] is
  // the first.
  int64_t stride = 0;
  int64_t count = 0;  // elements
  int inputs_count = 0;
  int group = 1;  // inputs; divides their number
  float scale = 1;
  DType dtype = DType::kFloat32;
  Combine combine = Combine::kSum;
};

// Finished sums, each to be multiplied in place: in fp32, then rounded once.
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

// The largest grids of one device, in blocks of threads (resident_blocks.h): for each DType and
// Combine, and for each DType.
struct ReduceGrids {
  int blocks[4][3] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
  int scale[4] = {1, 1, 1, 1};

  int Of(const ReduceArrays& arrays) const {
    return blocks[static_cast<int>(arrays.dtype)][static_cast<int>(arrays.combine)];
  }
};

// Loads the kernels of all types onto the current device. An error if the device is older than this
// build's code.
cudaError_t LoadReductions(ReduceGrids* grids);

// Enqueues one on a stream of the current device; `grids` are that device's. Returns CUDA's error
// for this launch, not for earlier work.
cudaError_t LaunchReduce(const ReduceGrids& grids, cudaStream_t stream, const ReduceArrays& arrays);
cudaError_t LaunchScale(const ReduceGrids& grids, cudaStream_t stream, const ScaleArrays& arrays);

}  // namespace ebb
