// The ops of each kind of device, for ops.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "ops/ops.h"

namespace ebb::gpt {

// On the CPU. `threads`: of one rank. Scratch is the caller's, of at least CpuScratchBytes, aligned to 64
// bytes, and outlives the ops.
int64_t CpuScratchBytes(DType compute, int threads, const OpsLimits& limits);
std::unique_ptr<Ops> NewCpuOps(DType compute, int threads, std::span<std::byte> scratch);

// On a GPU: cuBLASLt's products and our kernels, enqueued on the device's compute stream. Scratch is
// the caller's device memory, of at least CudaScratchBytes. It and the device outlive
// the ops. kUnimplemented: this build has no CUDA.
bool CudaOpsAreBuilt();
int64_t CudaScratchBytes(DType compute, const OpsLimits& limits);
absl::StatusOr<std::unique_ptr<Ops>> NewCudaOps(const Device& device, DType compute,
                                                const OpsLimits& limits,
                                                std::span<std::byte> scratch);

}  // namespace ebb::gpt
