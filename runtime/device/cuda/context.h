// One CUDA device as its streams, events and buffers share it: which one it is, and the first
// failure. CUDA calls fail late and elsewhere (a kernel's fault shows in whatever is called next),
// so one failure fails the whole device: nothing is enqueued any more, nobody waits any more, and
// status() says what went wrong first.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/device/cuda/failure_watch.h"
#include "ebb/runtime/device/cuda/host_order.h"

namespace ebb {

// How often one who waits for the device looks whether it still works.
inline constexpr std::chrono::milliseconds kLookEvery{100};

class CudaContext {
 public:
  CudaContext(int ordinal, std::string name) : ordinal_(ordinal), name_(std::move(name)) {}

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }  // "CUDA device 0 (NVIDIA H200)"

  HostOrder& host_order() { return host_order_; }
  FailureWatch& failure_watch() { return failure_watch_; }

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status status() const;
  // True if `call` went well. Otherwise the device has failed: "`call` on `stream` of CUDA device
  // 0 (...) failed: ...".
  bool Check(cudaError_t result, const char* call, std::string_view stream) {
    if (result == cudaSuccess) return true;
    Fail(result, call, stream);
    return false;
  }

 private:
  void Fail(cudaError_t result, const char* call, std::string_view stream);

  const int ordinal_;
  const std::string name_;
  HostOrder host_order_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  absl::Status status_;
  FailureWatch failure_watch_{*this};  // ends before what it uses
};

// Makes a device the calling thread's current one for as long as it exists.
//
// Not only the calls that mean the current device need it (allocations, launches, new streams and
// events). Every call that needs a context, also one that names a stream, an event or memory (query,
// synchronize, wait, record, copy, host function, destroy, free), makes one for the current device of
// a thread that has none yet; for a thread that never chose a device that is GPU 0, where then every
// rank of a host would hold some hundred MB. So all of those are made inside one of these. Without a
// context work: counting devices, their properties and attributes, cudaGetDevice, cudaGetLastError.
//
// cudaSetDevice makes a context, too. So the thread gets its own device back only where that has a
// context already, and keeps this one otherwise.
class CudaCurrent {
 public:
  explicit CudaCurrent(int ordinal);
  ~CudaCurrent();
  CudaCurrent(const CudaCurrent&) = delete;
  CudaCurrent& operator=(const CudaCurrent&) = delete;
  cudaError_t result() const { return result_; }

 private:
  const int ordinal_;
  int outer_ = 0;
  cudaError_t result_ = cudaSuccess;
};

// Whether this process has a context on a device. Makes none.
bool HasCudaContext(int ordinal);

// The release of a Buffer of locked host memory.
void FreeHostMemory(void* data, int64_t bytes, int device);

}  // namespace ebb
