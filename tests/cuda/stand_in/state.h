// The stand-in's shared state: the faults to inject and the count of existing objects.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/device/stream.h"
#include "stand_in.h"

namespace ebb::stand_in {

// 0, or the code with which this call of `function` must fail.
int Injected(const char* function);

enum class Thing {
  kStream,
  kEvent,
  kAllocation,
  kCommunicator,
  kOperator,
  kLocked,
  kRegistration,
  kProduct,
  kGraph,
  kHandle
};
void Count(Thing thing, int change);

// The code of a lost device, or cudaSuccess.
cudaError_t Lost();
// Runs `copy`, unless the device is lost. No copy runs then, because a caller that has heard of it
// frees memory.
void CopyUnlessLost(absl::FunctionRef<void()> copy);
// For a call of CUDA's `function`, which makes a context: the code with which it must fail, or
// cudaSuccess.
cudaError_t Called(const char* function);
bool HidesStreamWaitValue();
bool RefusesLocks();
void NoteRefusedLock();
bool HasRefusedLock();  // since Reset
size_t FreeMemory();
int64_t DriverBytes(int device);  // not free, if there was no SetFreeMemory
// 0: the version that it was built with.
int NcclVersion();
int CublasLtVersion();
bool OffersProducts();
int64_t ProductTime(uint32_t epilogue, int algorithm);
// Whether the kernel that these numbers identify must be loaded first.
bool LoadsProductNow(const std::array<int64_t, 8>& kernel);

// Called by Reset.
void ForgetContexts();
void ForgetNcclFaults();
void ForgetGraphLaunches();
void ForgetHostFunctions();

// Waits for all work enqueued on the current device, as every call that frees memory does on a real
// one. A kernel that waits for work behind such a call waits for ever. Callers may not rely on it,
// so it orders no operations.
void AwaitDevice();

// The first launch of a library's kernel, which waits for the device and holds the context
// meanwhile.
void LoadWhileOthersWait();
// For a collective: ends the program if it would have to wait for another thread's first launch.
void RequireNoLoading();
// Events behind the work that is now on the stream pass so much later by the clock.
void TakeTime(cudaStream_t stream, int64_t ns);

// Ends the program on a thread that runs a host function, which may make no call of CUDA.
void RequireNoHostFunction();

// For the next work enqueued on it: it ends only when other ranks have come.
void NoteCollective(cudaStream_t stream);

// How many blocks of a kernel the current device is said to run at once; each device has its own
// number.
int ResidentBlocks();

// Enqueues a host function that is a kernel for CUDA: it may wait for others, and runs beside the
// host functions. On a stream that captures it becomes a node, and runs at each launch of that.
// `release`, unless null, frees the argument after the last run.
void EnqueueKernel(cudaStream_t stream, void (*run)(void*), void* argument, void (*release)(void*));
void EnqueueKernel(cudaStream_t stream, const Task& kernel);

}  // namespace ebb::stand_in
