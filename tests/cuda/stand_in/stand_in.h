// A stand-in for the CUDA runtime, NCCL and the kernels of optim/cuda, linked into tests in their
// place: the functions that Ebb uses and no others, on the host, with "device" memory from malloc,
// streams that are threads, collectives between the threads of this process, and kernels that
// compute as the CPU does. It does what the real ones promise, and fails where a test asks it to.
//
// As strict as the real ones may be: the host functions of all streams take turns and call
// neither CUDA nor NCCL, what gives memory back waits for the device, only copies reach memory that is
// not CUDA's, and a kernel of gpt's that was not loaded ends the program. A copy to or from pageable memory waits inside the call for what
// is before it on its stream, and holds the context meanwhile, so no other thread's call gets
// through; behind a collective it ends the program. So do, where they are looked for, a launch that
// finds its queue full and the first launch of a library's kernel. Once memory could not be locked, copies from
// what is not CUDA's read it when they are called, whatever their stream still has to do.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

namespace ebb::stand_in {

// Back to 2 devices and nothing that fails. Nothing may be alive.
void Reset();

// What cudaGetDeviceCount answers.
void SetDevices(int count, cudaError_t result = cudaSuccess);

// The `nth` call from now of the named function ("cudaMalloc", "ncclAllGather", "LaunchCast"), counted from 1,
// returns `code` (a cudaError_t or ncclResult_t) and does nothing; later ones work.
void FailCall(const std::string& function, int code, int nth = 1);
// The device is lost: from now on every call that enqueues or waits returns `error`, and host
// functions that have not run never will. Until Reset.
void LoseDevice(cudaError_t error);
// What devices say that is free, whatever is allocated; 0: all but what the driver and libraries take.
// Until Reset.
void SetFreeMemory(size_t bytes);
// That is, of every device: its context, if it has one, and of all communicators, handles of cuBLASLt
// and graphs so much each.
inline constexpr int64_t kContextBytes = int64_t{64} << 20, kCommunicatorBytes = int64_t{8} << 20,
                         kHandleBytes = int64_t{1} << 20, kGraphBytes = int64_t{64} << 10;
// No memory of the host can be locked any more that is there already. Until Reset.
void RefuseLocks();
// The driver has no cuStreamWaitValue64. Until Reset.
void HideStreamWaitValue();

// What NCCL and cuBLASLt say of their versions, as NCCL_VERSION_CODE and CUBLAS_VERSION. Until Reset.
void SetNcclVersion(int version);
void SetCublasLtVersion(int version);
// cuBLASLt has no algorithm for any product. Until Reset.
void OfferNoProducts();
// How long a product with this epilogue takes on a device, by the algorithm with this number, of
// kProductAlgorithms that the heuristic names; 0: next to nothing. Until Reset.
inline constexpr int kProductAlgorithms = 3;
void SetProductTime(uint32_t epilogue, int algorithm, int64_t ns);
// The first launch of a product's kernel waits for the device. Until Reset.
void LoadProductsLazily();
// Launches that a stream takes before one more waits. Until Reset.
void SetLaunchQueue(int most);

// Communicators that are being made from now on never become ready / have an operation's host part
// never become ready: a rank is missing.
void StallCreation();
void StallLaunches();
// From now on an operation's host part is ready at the look of that number only. Until Reset.
void DelayLaunches(int looks);
// From now on NCCL notices `result` on the communicators of this rank; what runs on them goes on
// waiting.
void FailCommunicators(int rank, ncclResult_t result);

// Whether anything has made a context on the device, where a real one would hold memory. Until
// Reset.
bool HasContext(int device);

// The names of the threads that have called CUDA since ForgetCallers or Reset; or of those that have
// called this function of it.
std::set<std::string> Callers(std::string_view function = "");
void ForgetCallers();

// What NCCL takes when memory is to be registered: symmetric windows, buffers of one rank, nothing.
// Until Reset.
enum class Registers { kWindows, kBuffers, kNothing };
void SetRegisters(Registers what);
// Operations for which memory was registered with their communicator in vain, since the last call:
// they have touched other memory, or have not asked for a plain sum. Without barriers.
int TakeUnregistered();

// What has been made and not been given back.
struct Live {
  int streams = 0, events = 0, allocations = 0, communicators = 0, operators = 0, locked = 0,
      registrations = 0;
  int products = 0;  // what cuBLASLt describes them with
  int graphs = 0;    // captured and instantiated
  friend bool operator==(const Live&, const Live&) = default;
};
Live Alive();
// Of instantiated graphs, by all threads since Reset.
int GraphLaunches();
// Host functions that were enqueued, by all threads since Reset.
int HostFunctions();
// How often the calling thread has waited for the device so far, where it had to.
const std::atomic<int>& HostWaits();
// How often it has waited for an event that was not made to let it sleep.
int SpinningWaits();
// `stream` stands still until the calling thread waits for the device again.
void HoldUntilHostWaits(cudaStream_t stream);
// Whether the stream was made with the higher priority.
bool HasPriority(cudaStream_t stream);

}  // namespace ebb::stand_in
