// The reduction kernel as the host sees it. Nothing else of reduce.cu is named elsewhere, so whoever
// defines LaunchReduce takes its place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/config/dtype.h"

namespace ebb {

// A Reduction of one stage and its arrays, as they travel in a kernel's parameters.
struct ReduceArrays {
  static constexpr int kInputsMax = 64;
  enum class Combine : uint8_t { kSum, kMax, kMin };

  const void* inputs[kInputsMax] = {};
  void* destination = nullptr;  // one of the inputs, or overlaps none
  int64_t count = 0;            // elements
  int inputs_count = 0;
  int group = 1;  // inputs; divides their number
  float scale = 1;
  DType dtype = DType::kFloat32;
  Combine combine = Combine::kSum;
};

// Enqueues it on a stream of the current device. What CUDA says of the launch, and nothing of what
// was enqueued before.
cudaError_t LaunchReduce(cudaStream_t stream, const ReduceArrays& arrays);

}  // namespace ebb
