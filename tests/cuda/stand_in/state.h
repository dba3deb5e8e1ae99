// What the two halves of the stand-in share: the faults to inject and the count of what is alive.
#pragma once

#include <cuda_runtime_api.h>

#include "ebb/runtime/device/stream.h"
#include "stand_in.h"

namespace ebb::stand_in {

// 0, or the code that this call of `function` has to fail with.
int Injected(const char* function);

enum class Thing {
  kStream,
  kEvent,
  kAllocation,
  kCommunicator,
  kOperator,
  kLocked,
  kRegistration,
  kProduct
};
void Count(Thing thing, int change);

// The code of a lost device, or cudaSuccess.
cudaError_t Lost();
bool HidesStreamWaitValue();

// Of the two halves, for Reset.
void ForgetContexts();
void ForgetNcclFaults();

// What kernels are said to have resident on the current device, each device its own number.
int ResidentBlocks();

// Enqueues a host function that is a kernel for CUDA: it may wait for others, and runs beside the
// host functions.
void EnqueueKernel(cudaStream_t stream, void (*run)(void*), void* argument);
void EnqueueKernel(cudaStream_t stream, const Task& kernel);

}  // namespace ebb::stand_in
