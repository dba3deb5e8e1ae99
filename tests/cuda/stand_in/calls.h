// What calls of the CUDA runtime have in common: the context that they make, what they have to fail
// with, and which memory they may be given.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <shared_mutex>

namespace ebb::stand_in {

inline constexpr size_t kDeviceBytes = size_t{1} << 32;

int CurrentDevice();  // of the calling thread
// What needs a context makes it on the current device.
void UseContext();
// Of the current device. A call that waits inside the driver keeps all other calls of the context out.
std::shared_mutex& ContextLock();

// Of a call that allocates, makes or waits for something, or of one on `stream`, that no stream may
// capture.
cudaError_t FailureBesideCaptures(const char* function);
cudaError_t FailureOutsideOfCapture(const char* function, cudaStream_t stream);
// Of one that may be captured.
cudaError_t FailureOrSpoilt(const char* function, cudaStream_t stream);

// Whether it was allocated or locked with CUDA. Copies reach other memory of the host too, all else
// does not.
bool Knows(const void* data, size_t bytes);

}  // namespace ebb::stand_in
