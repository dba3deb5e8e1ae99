// The GPT's arithmetic on a CUDA device: cuBLASLt's products and our kernels, enqueued on the
// device's compute stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "ops/ops.h"

namespace ebb::gpt {

// Scratch is the caller's device memory, of at least CudaScratchBytes. It and the device outlive
// the ops. kUnimplemented: this build has no CUDA.
bool CudaOpsAreBuilt();
int64_t CudaScratchBytes(DType compute, const OpsLimits& limits);
absl::StatusOr<std::unique_ptr<Ops>> NewCudaOps(const Device& device, DType compute,
                                                const OpsLimits& limits,
                                                std::span<std::byte> scratch);

}  // namespace ebb::gpt
