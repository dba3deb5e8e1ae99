// Errors of the CUDA runtime as Statuses, in one place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// Which memory an error says is short.
enum class CudaMemory : uint8_t { kOfDevice, kLockedOfHost };

// OK for cudaSuccess. `what` begins the message: "cudaMemcpyAsync on stream 'gather' of CUDA device
// 0". After it come CUDA's text, the name of the error, and a remedy if there is one.
absl::Status CudaStatus(cudaError_t error, std::string_view what,
                        CudaMemory memory = CudaMemory::kOfDevice);

}  // namespace ebb
