// Matrix products by cuBLASLt (NVIDIA, "cuBLASLt API"). Work that goes with a product is fused into
// it, or our kernels do it. The choice between the two, and the algorithm, is made once for each
// shape, when it is first seen (product.h). By default a GELU is fused if cuBLASLt offers it,
// sums of a are not, and the heuristic's first answer is taken.
//
// A device that chooses the same ways gives the same bits in every run: one algorithm for each
// shape and alignment, and none that adds with atomics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

class Matmul {
 public:
  virtual ~Matmul() = default;

  // For the current device, as in Run. Scratch is the caller's device memory.
  static int64_t ScratchBytes(DType compute, const OpsLimits& limits);
  static absl::StatusOr<std::unique_ptr<Matmul>> Create(DType compute,
                                                        std::span<std::byte> scratch);

  virtual absl::Status Run(cudaStream_t stream, const MatmulArrays& arrays) = 0;
  // Ops' functions for products.
  virtual void Choose(const ProductChoice& choice) = 0;
  virtual std::string letters() const = 0;
};

}  // namespace ebb::gpt::cuda
