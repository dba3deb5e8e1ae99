// Matrix products by cuBLASLt (NVIDIA, "cuBLASLt API"), with what is done to the product fused into
// it or done by our kernels: which of the two, and by which algorithm, is settled once a shape, when it
// is first seen (product_ways.h). By default a GELU is fused where cuBLASLt offers it, sums of a are
// not, and the heuristic's first answer is taken.
//
// The same bits in every run on the same device that has chosen the same: one algorithm a shape and
// alignment, none that adds with atomics.
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

  // Of the device that is current, as in Run. Scratch is the caller's memory of the device.
  static int64_t ScratchBytes(DType compute, const OpsLimits& limits);
  static absl::StatusOr<std::unique_ptr<Matmul>> Create(DType compute,
                                                        std::span<std::byte> scratch);

  virtual absl::Status Run(cudaStream_t stream, const MatmulArrays& arrays) = 0;
  // As of Ops.
  virtual void Choose(const ProductChoice& choice) = 0;
  virtual std::string letters() const = 0;
};

}  // namespace ebb::gpt::cuda
