// Matrix products by cuBLASLt (NVIDIA, "cuBLASLt API"), with what is done to the product fused into
// it where cuBLASLt can, and done by our kernels where it cannot: which of the two is asked once a
// shape, when it is first seen.
//
// The same bits in every run on the same device: one algorithm a shape and
// alignment, none that adds with atomics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

class Matmul {
 public:
  virtual ~Matmul() = default;

  // Of the device that is current, as in Run. Scratch is the caller's memory of the device.
  static int64_t ScratchBytes(DType compute, const OpsLimits& limits);
  static absl::StatusOr<std::unique_ptr<Matmul>> Create(DType compute,
                                                        std::span<std::byte> scratch);

  virtual absl::Status Run(cudaStream_t stream, const MatmulArrays& arrays) = 0;
};

}  // namespace ebb::gpt::cuda
