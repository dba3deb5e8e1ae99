// The GPT's arithmetic on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ops/ops.h"

namespace ebb::gpt {

// `threads`: of one rank. Scratch is the caller's, of at least CpuScratchBytes, aligned to 64
// bytes, and outlives the ops.
int64_t CpuScratchBytes(DType compute, int threads, const OpsLimits& limits);
std::unique_ptr<Ops> NewCpuOps(DType compute, int threads, std::span<std::byte> scratch);

}  // namespace ebb::gpt
