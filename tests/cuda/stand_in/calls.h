// The common part of calls of the CUDA runtime: the context that they make, their injected
// failures, and the memory that they may use.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <shared_mutex>

namespace ebb::stand_in {

inline constexpr size_t kDeviceBytes = size_t{1} << 32;

int CurrentDevice();  // of the calling thread
// A call that needs a context makes it on the current device.
void UseContext();
// For the current device. A call that waits inside the driver blocks all other calls of the
// context.
std::shared_mutex& ContextLock();

// For a call that allocates, makes or waits, or a call on `stream` that may not be captured.
cudaError_t FailureBesideCaptures(const char* function);
cudaError_t FailureOutsideOfCapture(const char* function, cudaStream_t stream);
// For a call that may be captured.
cudaError_t FailureOrSpoilt(const char* function, cudaStream_t stream);

// Whether the memory was allocated or locked with CUDA. Copies also reach other memory of the host;
// all other work does not.
bool Knows(const void* data, size_t bytes);

}  // namespace ebb::stand_in
