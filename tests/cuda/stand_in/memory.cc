// Memory: allocations, locks, copies and fills.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "calls.h"
#include "graph.h"
#include "order.h"
#include "state.h"
#include "streams.h"

namespace ebb::stand_in {
namespace {

std::mutex memory_mutex;
std::map<const std::byte*, size_t> memory;  // memory that CUDA has allocated or locked

void Register(const void* data, size_t bytes) {
  NoteAllocation(data, bytes);
  const std::scoped_lock lock(memory_mutex);
  memory[static_cast<const std::byte*>(data)] = bytes;
}
void Forget(const void* data) {
  ForgetAllocation(data);
  const std::scoped_lock lock(memory_mutex);
  memory.erase(static_cast<const std::byte*>(data));
}

// For calls that free memory of the current device; an error that they return is of an earlier
// call.
cudaError_t Release(const char* function, void* data) {
  const cudaError_t earlier = Called(function);
  if (const auto refused = RefuseOnCapturingThread()) return refused;
  AwaitDevice();
  Forget(data);
  std::free(data);
  Count(Thing::kAllocation, -1);
  return earlier;
}

}  // namespace

bool Knows(const void* data, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::scoped_lock lock(memory_mutex);
  auto found = memory.upper_bound(begin);
  if (found == memory.begin()) return false;
  --found;
  return begin + bytes <= found->first + found->second;
}

void NoteKernel(cudaStream_t stream, const char* what, std::span<const Touched> touched) {
  for (const Touched& each : touched) {
    if (each.bytes == 0 || Knows(each.data, each.bytes)) continue;
    std::fprintf(stderr, "stand-in for CUDA: %s %s memory that is not CUDA's\n", what,
                 each.writes ? "writes" : "reads");
    std::abort();
  }
  NoteTouch(stream, what, touched);
}

}  // namespace ebb::stand_in

using namespace ebb::stand_in;  // what the C functions below use

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (const auto failure = FailureBesideCaptures("cudaMalloc")) return failure;
  if (bytes > kDeviceBytes) return cudaErrorMemoryAllocation;
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xa5, bytes);  // it may have had other contents
  Register(*data, bytes);
  Count(Thing::kAllocation, 1);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (const auto failure = FailureBesideCaptures("cudaHostAlloc")) return failure;
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xa5, bytes);
  Register(*data, bytes);
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
  Register(data, bytes);
  Count(Thing::kLocked, 1);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  const cudaError_t earlier = Called("cudaHostUnregister");
  if (const auto refused = RefuseOnCapturingThread()) return refused;
  AwaitDevice();
  Forget(data);
  Count(Thing::kLocked, -1);
  return earlier;
}
cudaError_t cudaFreeHost(void* data) {
  return Release("cudaFreeHost", data);
}
cudaError_t cudaFree(void* data) {
  return Release("cudaFree", data);
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (const auto failure = FailureOrSpoilt("cudaMemcpyAsync", stream)) return failure;
  const bool pageable = !Knows(source, bytes) || !Knows(destination, bytes);
  {
    const std::scoped_lock lock(stream->mutex);
    const Touched touched[] = {Reads(source, bytes), Writes(destination, bytes)};
    NoteTouch(stream, "cudaMemcpyAsync", touched);
    ebb::Task copy([=] { CopyUnlessLost([=] { std::memcpy(destination, source, bytes); }); });
    if (Captures(stream)) {
      KeepTask(stream, std::move(copy), nullptr, nullptr);
      return cudaSuccess;
    }
    if (HasRefusedLock() && !Knows(source, bytes)) {
      void* const staged = std::malloc(bytes);
      std::memcpy(staged, source, bytes);
      stream->stream.Enqueue([=] {
        CopyUnlessLost([=] { std::memcpy(destination, staged, bytes); });
        std::free(staged);
      });
      return cudaSuccess;
    }
    stream->stream.Enqueue(std::move(copy));
  }
  if (pageable) AwaitInDriver(stream);
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
    TakePlaceInQueue(stream);
    stream->stream.Zero(data, static_cast<int64_t>(bytes));
    GivePlaceBack(stream);
  }
  return cudaSuccess;
}

}  // extern "C"
