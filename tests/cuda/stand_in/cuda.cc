// The CUDA runtime's half: streams and events are those of the CPU device.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ebb/runtime/device/device.h"
#include "graph.h"
#include "order.h"
#include "state.h"

// What CUDA leaves opaque. Several threads may enqueue on a stream of CUDA.
struct CUstream_st {
  ebb::Stream stream;
  ebb::Event end;  // as of the last query
  bool has_priority;
  int device;
  std::mutex mutex;
};
struct CUevent_st {
  ebb::Event event;
};

namespace {

using namespace ebb::stand_in;  // the file's own

constexpr size_t kDeviceBytes = size_t{1} << 32;
constexpr int kLeastPriority = 0, kGreatestPriority = -5;

// Streams are threads: none shares a queue with another, however many there are.
[[maybe_unused]] const int queues_are_many = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1000000", 1);

std::atomic<int> device_count{2};
std::atomic<cudaError_t> device_count_result{cudaSuccess};
thread_local int current_device = 0;
std::array<std::atomic<bool>, 64> contexts;  // of devices that have one
thread_local std::atomic<int> host_waits{0};
std::mutex host_functions;  // one at a time, whatever their streams
std::mutex memory_mutex;
std::map<const std::byte*, size_t> memory;  // what CUDA has given or locked
std::mutex streams_mutex;
std::set<cudaStream_t> streams;  // of all devices

void AwaitOnHost(const ebb::Event& event) {
  if (!event.Passed()) ++host_waits;
  event.Wait();
}

ebb::Device& Host() {
  static ebb::Device device = ebb::Device::Cpu(1);
  return device;
}

std::mutex callers_mutex;
// Of a fixed size, as those who enqueue are tested to allocate nothing.
struct Call {
  std::string_view function;  // "": any
  std::array<char, 16> thread = {};
  friend bool operator==(const Call&, const Call&) = default;
};
std::array<Call, 4096> calls;  // each once
size_t calls_noted = 0;

void NoteCaller(std::string_view function) {
  Call call = {.function = function};
  pthread_getname_np(pthread_self(), call.thread.data(), call.thread.size());
  const std::scoped_lock lock(callers_mutex);
  const auto end = calls.begin() + static_cast<std::ptrdiff_t>(calls_noted);
  if (std::find(calls.begin(), end, call) == end && end != calls.end()) calls[calls_noted++] = call;
}

// What needs a context makes it on the current device.
void UseContext() {
  NoteCaller("");
  contexts[static_cast<size_t>(current_device)] = true;
}

void Learn(const void* data, size_t bytes) {
  NoteAllocation(data, bytes);
  const std::scoped_lock lock(memory_mutex);
  memory[static_cast<const std::byte*>(data)] = bytes;
}
void Forget(const void* data) {
  ForgetAllocation(data);
  const std::scoped_lock lock(memory_mutex);
  memory.erase(static_cast<const std::byte*>(data));
}

// Whether it was allocated or locked with CUDA. Copies reach other memory of the host too, all else
// does not.
bool Knows(const void* data, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::scoped_lock lock(memory_mutex);
  auto found = memory.upper_bound(begin);
  if (found == memory.begin()) return false;
  --found;
  return begin + bytes <= found->first + found->second;
}

// What gives memory of the current device back.
cudaError_t Release(void* data) {
  UseContext();
  if (const auto refused = RefuseOnCapturingThread()) return refused;
  AwaitDevice();
  Forget(data);
  std::free(data);
  Count(Thing::kAllocation, -1);
  return cudaSuccess;
}

// Of a call that allocates, makes or waits for something, or of one on `stream`, that no stream may
// capture.
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

// The driver's functions, which are found by their names.
CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
  return CUDA_SUCCESS;
}

CUresult DevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = ebb::stand_in::HasContext(device);
  return CUDA_SUCCESS;
}

CUresult StreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  if (const auto failure = FailureOutsideOfCapture("cuStreamWaitValue64", stream))
    return static_cast<CUresult>(failure);
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
  EnqueueKernel(stream, ebb::Task([address, value] {
                  const auto& word = *reinterpret_cast<const std::atomic<int64_t>*>(address);
                  while (word.load(std::memory_order_acquire) < static_cast<int64_t>(value) &&
                         Lost() == cudaSuccess)
                    std::this_thread::yield();
                }));
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t ebb::stand_in::Called(const char* function) {
  UseContext();
  NoteCaller(function);
  if (Lost() != cudaSuccess) return Lost();
  return static_cast<cudaError_t>(Injected(function));
}
void ebb::stand_in::SetDevices(int count, cudaError_t result) {
  device_count = count;
  device_count_result = result;
}
std::set<std::string> ebb::stand_in::Callers(std::string_view function) {
  const std::scoped_lock lock(callers_mutex);
  std::set<std::string> names;
  for (size_t i = 0; i < calls_noted; ++i) {
    if (calls[i].function == function) names.insert(calls[i].thread.data());
  }
  return names;
}
void ebb::stand_in::ForgetCallers() {
  const std::scoped_lock lock(callers_mutex);
  calls_noted = 0;
}
bool ebb::stand_in::HasContext(int device) {
  return contexts[static_cast<size_t>(device)];
}
void ebb::stand_in::ForgetContexts() {
  for (auto& context : contexts) context = false;
}
int ebb::stand_in::ResidentBlocks() {
  return 100 + current_device;
}
const std::atomic<int>& ebb::stand_in::HostWaits() {
  return host_waits;
}
void ebb::stand_in::NoteKernel(cudaStream_t stream, const char* what,
                               std::span<const Touched> touched) {
  for (const Touched& each : touched) {
    if (each.bytes == 0 || Knows(each.data, each.bytes)) continue;
    std::fprintf(stderr, "stand-in for CUDA: %s %s memory that is not CUDA's\n", what,
                 each.writes ? "writes" : "reads");
    std::abort();
  }
  NoteTouch(stream, what, touched);
}

void ebb::stand_in::AwaitDevice() {
  if (Lost() != cudaSuccess) return;
  std::vector<ebb::Event> ends;
  {
    const std::scoped_lock lock(streams_mutex);
    for (const cudaStream_t stream : streams) {
      if (stream->device != current_device) continue;
      const std::scoped_lock turn(stream->mutex);
      stream->stream.Record(ends.emplace_back(*Host().NewEvent()));
    }
  }
  for (const ebb::Event& end : ends) AwaitOnHost(end);
}
void ebb::stand_in::HoldUntilHostWaits(cudaStream_t stream) {
  EnqueueKernel(stream, Task([waits = &host_waits, before = host_waits.load()] {
                  while (waits->load() == before) std::this_thread::yield();
                }));
}
bool ebb::stand_in::HasPriority(cudaStream_t stream) {
  return stream->has_priority;
}
void ebb::stand_in::EnqueueKernel(cudaStream_t stream, void (*run)(void*), void* argument,
                                  void (*release)(void*)) {
  if (KeepTask(stream, Task([run, argument] { run(argument); }), argument, release)) return;
  EnqueueKernel(stream, Task([run, argument, release] {
                  run(argument);
                  if (release != nullptr) release(argument);
                }));
}
void ebb::stand_in::EnqueueKernel(cudaStream_t stream, const Task& kernel) {
  UseContext();
  if (KeepTask(stream, kernel, nullptr, nullptr)) return;
  const std::scoped_lock lock(stream->mutex);
  stream->stream.Enqueue(kernel);
}

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
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = kLeastPriority;
  *greatest = kGreatestPriority;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  UseContext();
  if (const int code = Injected("cudaMemGetInfo")) return static_cast<cudaError_t>(code);
  *total_bytes = kDeviceBytes;
  *free_bytes = FreeMemory() > 0 ? FreeMemory() : kDeviceBytes;
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
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  UseContext();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (const auto failure = FailureBesideCaptures("cudaMalloc")) return failure;
  if (bytes > kDeviceBytes) return cudaErrorMemoryAllocation;
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xa5, bytes);  // it may have been anybody's
  Learn(*data, bytes);
  Count(Thing::kAllocation, 1);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (const auto failure = FailureBesideCaptures("cudaHostAlloc")) return failure;
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xa5, bytes);
  Learn(*data, bytes);
  Count(Thing::kAllocation, 1);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned) {
  auto failure = FailureBesideCaptures("cudaHostRegister");
  if (failure == cudaSuccess && RefusesLocks()) failure = cudaErrorMemoryAllocation;
  if (failure != cudaSuccess) {
    NoteRefusedLock();
    return failure;
  }
  Learn(data, bytes);
  Count(Thing::kLocked, 1);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  UseContext();
  if (const auto refused = RefuseOnCapturingThread()) return refused;
  AwaitDevice();
  Forget(data);
  Count(Thing::kLocked, -1);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  return Release(data);
}
cudaError_t cudaFree(void* data) {
  return Release(data);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (const auto failure = FailureBesideCaptures("cudaStreamCreateWithPriority")) return failure;
  if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
  auto made = Host().NewStream("stand-in");
  if (!made.ok()) return cudaErrorMemoryAllocation;
  *stream = new CUstream_st{
      *std::move(made), *Host().NewEvent(), priority == kGreatestPriority, current_device, {}};
  Count(Thing::kStream, 1);
  const std::scoped_lock lock(streams_mutex);
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  UseContext();
  Forget(stream);
  {
    const std::scoped_lock lock(streams_mutex);
    streams.erase(stream);
  }
  delete stream;
  Count(Thing::kStream, -1);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const auto failure = FailureOutsideOfCapture("cudaStreamQuery", stream)) return failure;
  const std::scoped_lock lock(stream->mutex);
  stream->stream.Record(stream->end);
  if (!stream->end.Passed()) return cudaErrorNotReady;
  NotePassed(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto failure = FailureOutsideOfCapture("cudaStreamSynchronize", stream)) return failure;
  {
    const std::scoped_lock lock(stream->mutex);
    stream->stream.Record(stream->end);
  }
  AwaitOnHost(stream->end);
  NotePassed(stream);
  return Lost();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const auto failure = Called("cudaStreamWaitEvent")) return failure;
  if (const auto refused = RefuseWhileCapturing(stream, cudaErrorStreamCaptureIsolation))
    return refused;
  const std::scoped_lock lock(stream->mutex);
  NoteWait(stream, event);
  stream->stream.Wait(event->event);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const auto failure = FailureBesideCaptures("cudaEventCreateWithFlags")) return failure;
  if (flags != cudaEventDisableTiming) return cudaErrorInvalidValue;
  *event = new CUevent_st{*Host().NewEvent()};
  Count(Thing::kEvent, 1);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  UseContext();
  Forget(event);
  delete event;
  Count(Thing::kEvent, -1);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const auto failure = FailureOutsideOfCapture("cudaEventRecord", stream)) return failure;
  const std::scoped_lock lock(stream->mutex);
  NoteRecord(stream, event);
  stream->stream.Record(event->event);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const auto failure = FailureBesideCaptures("cudaEventQuery")) return failure;
  if (!event->event.Passed()) return cudaErrorNotReady;
  NotePassed(event);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto failure = FailureBesideCaptures("cudaEventSynchronize")) return failure;
  AwaitOnHost(event->event);
  NotePassed(event);
  return Lost();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (const auto failure = FailureOutsideOfCapture("cudaLaunchHostFunc", stream)) return failure;
  const std::scoped_lock lock(stream->mutex);
  stream->stream.Enqueue([function, argument] {
    const std::scoped_lock turn(host_functions);
    if (Lost() == cudaSuccess) function(argument);
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (const auto failure = FailureOrSpoilt("cudaMemcpyAsync", stream)) return failure;
  const std::scoped_lock lock(stream->mutex);
  const Touched touched[] = {Reads(source, bytes), Writes(destination, bytes)};
  NoteTouch(stream, "cudaMemcpyAsync", touched);
  ebb::Task copy([=] { CopyUnlessLost([=] { std::memcpy(destination, source, bytes); }); });
  if (Captures(stream)) {
    KeepTask(stream, std::move(copy), nullptr, nullptr);
  } else if (!HasRefusedLock() || Knows(source, bytes)) {
    stream->stream.Enqueue(std::move(copy));
  } else {
    void* const staged = std::malloc(bytes);
    std::memcpy(staged, source, bytes);
    stream->stream.Enqueue([=] {
      CopyUnlessLost([=] { std::memcpy(destination, staged, bytes); });
      std::free(staged);
    });
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (const auto failure = FailureOrSpoilt("cudaMemsetAsync", stream)) return failure;
  if (value != 0 || !Knows(data, bytes)) return cudaErrorInvalidValue;
  const std::scoped_lock lock(stream->mutex);
  const Touched touched[] = {Writes(data, bytes)};
  NoteTouch(stream, "cudaMemsetAsync", touched);
  if (Captures(stream)) {
    KeepTask(stream, ebb::Task([=] { std::memset(data, 0, bytes); }), nullptr, nullptr);
  } else {
    stream->stream.Zero(data, static_cast<int64_t>(bytes));
  }
  return cudaSuccess;
}

}  // extern "C"
