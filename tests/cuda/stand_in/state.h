// What the two halves of the stand-in share: the faults to inject and the count of what is alive.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
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
  kProduct,
  kGraph,
  kHandle
};
void Count(Thing thing, int change);

// The code of a lost device, or cudaSuccess.
cudaError_t Lost();
// `copy`, or nothing once the device is lost: then none is under way either, since who has heard of it
// gives memory back.
void CopyUnlessLost(absl::FunctionRef<void()> copy);
// Of a call of CUDA's `function`, which makes a context: what it has to fail with, or cudaSuccess.
cudaError_t Called(const char* function);
bool HidesStreamWaitValue();
bool RefusesLocks();
void NoteRefusedLock();
bool HasRefusedLock();  // since Reset
size_t FreeMemory();
int64_t DriverBytes(int device);  // what is not free without SetFreeMemory
// 0: as it was built with.
int NcclVersion();
int CublasLtVersion();
bool OffersProducts();
int64_t ProductTime(uint32_t epilogue, int algorithm);
// Whether a kernel that these numbers tell from others has to be loaded first.
bool LoadsProductNow(const std::array<int64_t, 8>& kernel);

// Of the two halves, for Reset.
void ForgetContexts();
void ForgetNcclFaults();
void ForgetGraphLaunches();
void ForgetHostFunctions();

// Waits for all that is enqueued on the current device, as whatever gives memory back does on a real
// one: a kernel that waits for what comes behind such a call waits for ever. Nobody may count on it,
// so it ties no operations together.
void AwaitDevice();

// The first launch of a library's kernel, which waits for the device and holds the context meanwhile.
void LoadWhileOthersWait();
// Of a collective: ends the program where it would have to wait for another thread's first launch.
void RequireNoLoading();
// Events behind what is enqueued on the stream now are said to be so much later.
void TakeTime(cudaStream_t stream, int64_t ns);

// Ends the program on the thread that runs a host function, where nothing of CUDA may be called.
void RequireNoHostFunction();

// Of what is enqueued on it next: it ends only when other ranks have come.
void NoteCollective(cudaStream_t stream);

// What kernels are said to have resident on the current device, each device its own number.
int ResidentBlocks();

// Enqueues a host function that is a kernel for CUDA: it may wait for others, and runs beside the
// host functions. Of a stream that captures it becomes a node, and runs each time that is launched.
// `release`, unless null, frees the argument after the last run.
void EnqueueKernel(cudaStream_t stream, void (*run)(void*), void* argument, void (*release)(void*));
void EnqueueKernel(cudaStream_t stream, const Task& kernel);

}  // namespace ebb::stand_in
