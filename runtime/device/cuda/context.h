// The shared part of the streams, events and buffers of one CUDA device: which device it is, and
// its first failure. CUDA calls fail late and elsewhere (any later call may report a kernel's
// fault). So one failure fails the whole device: nothing is enqueued any more, no wait blocks any
// more, and status() says what failed first.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/device/cuda/current_device.h"
#include "ebb/runtime/device/cuda/failure_watch.h"
#include "ebb/runtime/device/cuda/host_order.h"

namespace ebb {

// A function of the CUDA driver, which is not linked, because programs must start on machines
// without it. Null: there is no driver, or it lacks this function of CUDA 12.0.
void* DriverFunction(const char* name);

// How often a thread that waits for the device checks that it still works.
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
  // True if `call` succeeded. Otherwise the device fails: "`call` on `stream` of CUDA device 0
  // (...) failed: ...".
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
  FailureWatch failure_watch_{*this};  // destroyed before the members that it uses
};

// Whether this process has a context on a device. Makes none.
bool HasCudaContext(int ordinal);

// The release of a Buffer of locked host memory.
void FreeHostMemory(void* data, int64_t bytes, int device);

}  // namespace ebb
