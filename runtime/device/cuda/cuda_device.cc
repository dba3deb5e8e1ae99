#include "ebb/runtime/device/cuda/cuda_device.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/device/cuda/cuda_event.h"
#include "ebb/runtime/device/cuda/cuda_host_stream.h"
#include "ebb/runtime/device/cuda/cuda_span_clock.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {
namespace {

constexpr int kPartsPerThread = 4;

absl::StatusOr<int> CountDevices() {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess && count > 0) return count;
  return absl::UnavailableError(absl::StrCat(
      "no CUDA driver or device: ",
      result == cudaSuccess ? "this process sees no device" : cudaGetErrorString(result),
      "; install a driver, look at CUDA_VISIBLE_DEVICES, or run on the CPU (gpt: --device cpu)"));
}

// Uses all 16 bytes of the UUID, because devices may differ in any of them.
uint64_t IdentityOf(const cudaDeviceProp& properties) {
  uint64_t halves[2];
  static_assert(sizeof(halves) == sizeof(properties.uuid.bytes));
  std::memcpy(halves, properties.uuid.bytes, sizeof(halves));
  return halves[0] ^ std::rotl(halves[1], 1);
}

// If freeing fails, the error is an earlier one, which status() reports. The error is cleared
// because the next launch would report it as its own.
void Free(void* data, int64_t, int device) {
  const CudaCurrent current(device);
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();
}

void Unlock(void* data, int64_t, int device) {
  const CudaCurrent current(device);
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

// The bytes that this process's contexts took of their devices, and that others took meanwhile.
// Ranks of one process that open a device at once make one context. So each holds the lock from the
// look for a context until the measurement: the second rank finds what the first has measured.
class ContextBytes {
 public:
  explicit ContextBytes(int ordinal) : ordinal_(ordinal), was_there_(HasCudaContext(ordinal)) {}

  // The bytes of the context that exists now. 0: it existed before the first CudaDevice.
  int64_t Measure() {
    size_t free_bytes = 0, total_bytes = 0;
    if (!was_there_ && cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess)
      measured_.try_emplace(ordinal_, static_cast<int64_t>(total_bytes - free_bytes));
    const auto found = measured_.find(ordinal_);
    return found == measured_.end() ? 0 : found->second;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::map<int, int64_t> measured_;  // by ordinal

  const std::scoped_lock<std::mutex> lock_{mutex_};
  const int ordinal_;
  const bool was_there_;
};

// The error of an allocation that is wrong before CUDA is asked.
absl::Status CheckRequest(const CudaContext& context, int64_t bytes, std::string_view what) {
  EBB_RETURN_IF_ERROR(context.status());
  if (bytes >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes for ",
                                                 absl::string_view(what.data(), what.size())));
}

absl::Status OutOfMemory(const CudaContext& context, int64_t bytes, std::string_view what) {
  size_t free_bytes = 0, total_bytes = 0;
  const bool known = cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess;
  return CudaStatus(cudaErrorMemoryAllocation,
                    absl::StrCat("allocating ", bytes, " bytes of ", context.name(), " for ",
                                 absl::string_view(what.data(), what.size()),
                                 known ? absl::StrCat(", of which ", free_bytes, " of ",
                                                      total_bytes, " bytes are free,")
                                       : ""));
}

}  // namespace

absl::StatusOr<Device> Device::Cuda(int ordinal, StreamView compute) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<CudaDevice> device,
                       CudaDevice::Create(ordinal, static_cast<cudaStream_t>(compute.native)));
  return Device(std::move(device));
}

absl::StatusOr<int> Device::CudaDevices() {
  return CountDevices();
}

absl::StatusOr<std::shared_ptr<CudaDevice>> CudaDevice::Create(int ordinal, cudaStream_t compute) {
  EBB_ASSIGN_OR_RETURN(const int count, CountDevices());
  if (ordinal < 0 || ordinal >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no CUDA device ", ordinal, ": this process sees ", count,
                     ", numbered from 0 (CUDA_VISIBLE_DEVICES decides which)"));
  }
  ContextBytes context_bytes(ordinal);
  const CudaCurrent current(ordinal);
  const std::string name = absl::StrCat("CUDA device ", ordinal);
  EBB_RETURN_IF_ERROR(CudaStatus(current.result(), absl::StrCat("opening ", name)));
  cudaDeviceProp properties = {};
  EBB_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, ordinal),
                                 absl::StrCat("reading the properties of ", name)));
  std::shared_ptr<CudaDevice> device(new CudaDevice(
      std::make_shared<CudaContext>(
          ordinal, absl::StrCat(name, " (", static_cast<const char*>(properties.name), ")")),
      IdentityOf(properties)));
  EBB_RETURN_IF_ERROR(device->MakeStreams(compute));
  device->driver_memory_.Add(context_bytes.Measure());
  return device;
}

// The team updates offloaded parts while the trainer's thread enqueues, or spins in a call of CUDA,
// for which one core is left free. A thread that shares its core is slow, so there are several
// parts for each thread, and the other threads take more of them.
CudaDevice::CudaDevice(std::shared_ptr<CudaContext> context, uint64_t identity)
    : context_(std::move(context)),
      identity_(identity),
      team_(std::make_shared<ThreadTeam>(std::max(CoreShare::CoresPerRank() - 1, 1),
                                         kPartsPerThread)) {}

absl::Status CudaDevice::MakeStreams(cudaStream_t compute) {
  EBB_ASSIGN_OR_RETURN(fill_, NewCudaStream(*context_, "fill"));
  if (compute == nullptr) {
    EBB_ASSIGN_OR_RETURN(compute_, NewCudaStream(*context_, "compute"));
    return absl::OkStatus();
  }
  compute_ = SharedCudaStream(compute, [](cudaStream_t) {});
  const cudaError_t state = cudaStreamQuery(compute);
  if (state == cudaErrorNotReady) cudaGetLastError();  // no error
  return CudaStatus(state == cudaErrorNotReady ? cudaSuccess : state,
                    absl::StrCat("using the given stream on ", context_->name()));
}

std::optional<int64_t> CudaDevice::free_bytes() const {
  const CudaCurrent current(context_->ordinal());
  size_t free_bytes = 0, total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess)
    return static_cast<int64_t>(free_bytes);
  cudaGetLastError();  // the next user of the device gets the error
  return std::nullopt;
}

absl::StatusOr<std::unique_ptr<StreamBackend>> CudaDevice::NewStream(std::string_view name,
                                                                     int tasks_max) {
  return NewStreamOf(StreamPriority::kUsual, name, tasks_max);
}

absl::StatusOr<std::unique_ptr<StreamBackend>> CudaDevice::NewStreamOf(StreamPriority priority,
                                                                       std::string_view name,
                                                                       int tasks_max) {
  EBB_RETURN_IF_ERROR(context_->status());
  EBB_ASSIGN_OR_RETURN(SharedCudaStream stream, NewCudaStream(*context_, name, priority));
  return std::make_unique<CudaStream>(context_, team_, std::move(stream), name, tasks_max);
}

absl::StatusOr<std::unique_ptr<StreamBackend>> CudaDevice::NewHostStream(std::string_view name,
                                                                         int tasks_max) {
  EBB_RETURN_IF_ERROR(context_->status());
  return CudaHostStream::Create(context_, team_, name, tasks_max);
}

std::unique_ptr<StreamBackend> CudaDevice::CallerStream() {
  return std::make_unique<CudaStream>(context_, team_, compute_, "compute", kStreamTasksMax);
}

absl::StatusOr<std::unique_ptr<EventBackend>> CudaDevice::NewEvent() {
  return CudaEvent::Create(context_, /*awaited=*/false);
}

absl::StatusOr<std::unique_ptr<EventBackend>> CudaDevice::NewAwaitedEvent() {
  return CudaEvent::Create(context_, /*awaited=*/true);
}

absl::StatusOr<std::unique_ptr<SpanClock>> CudaDevice::NewSpanClock() {
  return CudaSpanClock::Create(context_);
}

absl::StatusOr<Buffer> CudaDevice::Allocate(int64_t bytes, std::string_view what) {
  EBB_RETURN_IF_ERROR(CheckRequest(*context_, bytes, what));
  if (bytes == 0) return Buffer();
  const CudaCurrent current(context_->ordinal());
  void* data = nullptr;
  if (const cudaError_t result = cudaMalloc(&data, static_cast<size_t>(bytes));
      result != cudaSuccess) {
    cudaGetLastError();  // handled here
    if (result == cudaErrorMemoryAllocation) return OutOfMemory(*context_, bytes, what);
    return CudaStatus(result, absl::StrCat("allocating memory of ", context_->name()));
  }
  Buffer buffer(data, bytes, &Free, ordinal());
  cudaError_t filled = cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), fill_.get());
  if (filled == cudaSuccess) filled = cudaStreamSynchronize(fill_.get());
  EBB_RETURN_IF_ERROR(CudaStatus(filled, absl::StrCat("zeroing new memory of ", context_->name())));
  return buffer;
}

absl::StatusOr<Buffer> CudaDevice::AllocateShared(int64_t bytes, std::string_view what) {
  EBB_RETURN_IF_ERROR(CheckRequest(*context_, bytes, what));
  if (bytes == 0) return Buffer();
  const CudaCurrent current(context_->ordinal());
  void* data = nullptr;
  const cudaError_t result =
      cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped);
  if (result != cudaSuccess) {
    cudaGetLastError();  // handled here
    return CudaStatus(
        result,
        absl::StrCat("locking ", bytes, " bytes of host memory that ", context_->name(),
                     " shares, for ", absl::string_view(what.data(), what.size())),
        CudaMemory::kLockedOfHost);
  }
  std::memset(data, 0, static_cast<size_t>(bytes));
  return Buffer(data, bytes, &FreeHostMemory, ordinal());
}

absl::StatusOr<LockedRange> CudaDevice::LockHostMemory(std::span<std::byte> memory,
                                                       std::string_view what) {
  EBB_RETURN_IF_ERROR(context_->status());
  if (memory.empty()) return LockedRange();
  PopulatePages(*team_, memory);
  const CudaCurrent current(context_->ordinal());
  const cudaError_t result = cudaHostRegister(memory.data(), memory.size(),
                                              cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (result != cudaSuccess) {
    cudaGetLastError();  // handled here
    return CudaStatus(
        result,
        absl::StrCat("locking ", memory.size(), " bytes of host memory for ", context_->name(),
                     ", for ", absl::string_view(what.data(), what.size())),
        CudaMemory::kLockedOfHost);
  }
  return LockedRange(memory, &Unlock, ordinal());
}

}  // namespace ebb
