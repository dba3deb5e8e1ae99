// Errors of the CUDA runtime as Statuses, in one place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// Of whose memory an error says that there is too little.
enum class CudaMemory : uint8_t { kOfDevice, kLockedOfHost };

// OK for cudaSuccess. `what` begins the message: "cudaMemcpyAsync on stream 'gather' of CUDA device
// 0"; after it come CUDA's words, the name of the error and, where there is something, what to do.
absl::Status CudaStatus(cudaError_t error, std::string_view what,
                        CudaMemory memory = CudaMemory::kOfDevice);

}  // namespace ebb
