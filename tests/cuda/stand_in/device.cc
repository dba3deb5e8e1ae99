// Devices, their contexts, and which threads call.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "calls.h"
#include "ebb/runtime/device/stream.h"
#include "graph.h"
#include "state.h"

namespace ebb::stand_in {
namespace {

// Streams are threads, so none shares a queue with another.
[[maybe_unused]] const int queues_are_many = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1000000", 1);

std::atomic<int> device_count{2};
std::atomic<cudaError_t> device_count_result{cudaSuccess};
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::array<std::atomic<bool>, 64> contexts;  // of devices that have one
std::array<std::shared_mutex, 64> context_locks;

std::mutex callers_mutex;
// A call has a fixed size, because tests check that enqueuing threads allocate nothing.
struct Call {
  std::string_view function;  // "": any function
  std::array<char, 16> thread = {};
  friend bool operator==(const Call&, const Call&) = default;
};
std::array<Call, 4096> calls;  // each one once
size_t calls_noted = 0;

void NoteCaller(std::string_view function) {
  Call call = {.function = function};
  pthread_getname_np(pthread_self(), call.thread.data(), call.thread.size());
  const std::scoped_lock lock(callers_mutex);
  const auto end = calls.begin() + static_cast<std::ptrdiff_t>(calls_noted);
  if (std::find(calls.begin(), end, call) == end && end != calls.end()) calls[calls_noted++] = call;
}

// The driver's functions, which are found by their names.
CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
  return CUDA_SUCCESS;
}

CUresult DevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = HasContext(device);
  return CUDA_SUCCESS;
}

CUresult StreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  if (const auto failure = FailureOutsideOfCapture("cuStreamWaitValue64", stream))
    return static_cast<CUresult>(failure);
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
  EnqueueKernel(stream, Task([address, value] {
                  const auto& word = *reinterpret_cast<const std::atomic<int64_t>*>(address);
                  while (word.load(std::memory_order_acquire) < static_cast<int64_t>(value) &&
                         Lost() == cudaSuccess)
                    std::this_thread::yield();
                }));
  return CUDA_SUCCESS;
}

}  // namespace

int CurrentDevice() {
  return current_device;
}

void UseContext() {
  RequireNoHostFunction();
  NoteCaller("");
  contexts[static_cast<size_t>(current_device)] = true;
  const std::shared_lock turn(ContextLock());
}
std::shared_mutex& ContextLock() {
  return context_locks[static_cast<size_t>(current_device)];
}

cudaError_t FailureBesideCaptures(const char* function) {
  if (const auto failure = Called(function)) return failure;
  return RefuseOnCapturingThread();
}
cudaError_t FailureOutsideOfCapture(const char* function, cudaStream_t stream) {
  if (const auto failure = Called(function)) return failure;
  return RefuseWhileCapturing(stream);
}
cudaError_t FailureOrSpoilt(const char* function, cudaStream_t stream) {
  if (const auto failure = Called(function)) return failure;
  return CaptureState(stream);
}

cudaError_t Called(const char* function) {
  UseContext();
  NoteCaller(function);
  const cudaError_t result =
      Lost() != cudaSuccess ? Lost() : static_cast<cudaError_t>(Injected(function));
  if (result != cudaSuccess) last_error = result;
  return result;
}
void SetDevices(int count, cudaError_t result) {
  device_count = count;
  device_count_result = result;
}
std::set<std::string> Callers(std::string_view function) {
  const std::scoped_lock lock(callers_mutex);
  std::set<std::string> names;
  for (size_t i = 0; i < calls_noted; ++i) {
    if (calls[i].function == function) names.insert(calls[i].thread.data());
  }
  return names;
}
void ForgetCallers() {
  const std::scoped_lock lock(callers_mutex);
  calls_noted = 0;
}
bool HasContext(int device) {
  return contexts[static_cast<size_t>(device)];
}
void ForgetContexts() {
  for (auto& context : contexts) context = false;
}
int ResidentBlocks() {
  return 100 + current_device;
}

}  // namespace ebb::stand_in

using namespace ebb::stand_in;  // what the C functions below use

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count;
  return device_count_result;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count) return cudaErrorInvalidDevice;
  current_device = device;
  UseContext();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const int code = Injected("cudaGetDeviceProperties")) return static_cast<cudaError_t>(code);
  std::strcpy(properties->name, "stand-in");
  properties->uuid.bytes[0] = static_cast<char>(1 + device);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  UseContext();
  if (const int code = Injected("cudaMemGetInfo")) return static_cast<cudaError_t>(code);
  *total_bytes = kDeviceBytes;
  *free_bytes = FreeMemory() > 0 ? FreeMemory()
                                 : kDeviceBytes - static_cast<size_t>(DriverBytes(CurrentDevice()));
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfStandIn";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    default:
      return "an error of the stand-in";
  }
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
#else
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
#endif
  const std::string_view name = symbol;
  *function = name == "cuDeviceGetAttribute" ? reinterpret_cast<void*>(&DeviceGetAttribute)
              : name == "cuDevicePrimaryCtxGetState"
                  ? reinterpret_cast<void*>(&DevicePrimaryCtxGetState)
              : name == "cuStreamWaitValue64" && !HidesStreamWaitValue()
                  ? reinterpret_cast<void*>(&StreamWaitValue64)
                  : nullptr;
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  UseContext();
  return cudaSuccess;
}

}  // extern "C"
