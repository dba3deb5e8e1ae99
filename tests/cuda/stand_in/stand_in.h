// A stand-in for the CUDA runtime, NCCL and the kernels of optim/cuda, linked into tests in their
// place. It has only the functions that Ebb uses, on the host: "device" memory from malloc, streams
// that are threads, collectives between the threads of this process, and kernels that compute as
// the CPU does. It keeps the promises of the real ones, and fails if a test asks it to.
//
// It is as strict as the real ones may be. The host functions of all streams take turns and call
// neither CUDA nor NCCL. Freeing memory waits for the device. Only copies reach memory that is not
// CUDA's. A kernel of gpt's that was not loaded ends the program. A copy to or from pageable memory
// waits inside the call for the work before it on its stream. The copy holds the context meanwhile,
// so no other thread's call gets through; behind a collective it ends the program. So do, where
// tests look for them, a launch that finds its queue full and the first launch of a library's
// kernel. Once memory could not be locked, copies from memory that is not CUDA's read it when they
// are called, whatever their stream still has to do.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

namespace ebb::stand_in {

// Back to 2 devices and no failures. Nothing may exist.
void Reset();

// The result of cudaGetDeviceCount.
void SetDevices(int count, cudaError_t result = cudaSuccess);

// The `nth` call from now of the named function ("cudaMalloc", "ncclAllGather", "LaunchCast"),
// counted from 1, returns `code` (a cudaError_t or ncclResult_t) and does nothing; later ones work.
void FailCall(const std::string& function, int code, int nth = 1);
// The device is lost: from now on every call that enqueues or waits returns `error`, and host
// functions that have not run never will. Until Reset.
void LoseDevice(cudaError_t error);
// The bytes that devices report as free, whatever is allocated; 0: all bytes but those of the
// driver and libraries. Until Reset.
void SetFreeMemory(size_t bytes);
// The driver and libraries take of every device: its context, if it has one, and so much for each
// communicator, handle of cuBLASLt and graph.
inline constexpr int64_t kContextBytes = int64_t{64} << 20, kCommunicatorBytes = int64_t{8} << 20,
                         kHandleBytes = int64_t{1} << 20, kGraphBytes = int64_t{64} << 10;
// Existing host memory cannot be locked any more. Until Reset.
void RefuseLocks();
// The driver has no cuStreamWaitValue64. Until Reset.
void HideStreamWaitValue();

// The versions that NCCL and cuBLASLt report, as NCCL_VERSION_CODE and CUBLAS_VERSION. Until Reset.
void SetNcclVersion(int version);
void SetCublasLtVersion(int version);
// cuBLASLt has no algorithm for any product. Until Reset.
void OfferNoProducts();
// How long a product with this epilogue takes on a device with this algorithm, one of the
// kProductAlgorithms that the heuristic names; 0: next to nothing. Until Reset.
inline constexpr int kProductAlgorithms = 3;
void SetProductTime(uint32_t epilogue, int algorithm, int64_t ns);
// The first launch of a product's kernel waits for the device. Until Reset.
void LoadProductsLazily();
// Launches that a stream takes before the next one waits. Until Reset.
void SetLaunchQueue(int most);

// Communicators that are being made never become ready / have an operation's host part that never
// becomes ready, as if a rank were missing.
void StallCreation();
void StallLaunches();
// From now on an operation's host part is ready only at the look of that number. Until Reset.
void DelayLaunches(int looks);
// From now on NCCL notices `result` on the communicators of this rank. Work that runs on them goes
// on waiting.
void FailCommunicators(int rank, ncclResult_t result);

// Whether a call has made a context on the device, where a real one would take memory. Until Reset.
bool HasContext(int device);

// The names of the threads that have called CUDA since ForgetCallers or Reset; or only of the
// threads that have called this function.
std::set<std::string> Callers(std::string_view function = "");
void ForgetCallers();

// How NCCL registers memory: as symmetric windows, as buffers of one rank, or not. Until Reset.
enum class Registers { kWindows, kBuffers, kNothing };
void SetRegisters(Registers what);
// Operations since the last call on communicators with registered memory that did not use it: they
// have touched other memory, or have not asked for a plain sum. Without barriers.
int TakeUnregistered();

// Objects that were made and not destroyed.
struct Live {
  int streams = 0, events = 0, allocations = 0, communicators = 0, operators = 0, locked = 0,
      registrations = 0;
  int products = 0;  // cuBLASLt's descriptors
  int graphs = 0;    // captured and instantiated ones
  friend bool operator==(const Live&, const Live&) = default;
};
Live Alive();
// Launches of instantiated graphs, by all threads since Reset.
int GraphLaunches();
// Host functions that were enqueued, by all threads since Reset.
int HostFunctions();
// How often the calling thread has had to wait for the device so far.
const std::atomic<int>& HostWaits();
// How often it has waited for an event that was not made for sleeping waiters.
int SpinningWaits();
// `stream` stands still until the calling thread next waits for the device.
void HoldUntilHostWaits(cudaStream_t stream);
// Whether the stream was made with the higher priority.
bool HasPriority(cudaStream_t stream);

}  // namespace ebb::stand_in
