// One CUDA device as its streams, events and buffers share it: which one it is, and the first
// failure. CUDA calls fail late and elsewhere (a kernel's fault shows in whatever is called next),
// so one failure fails the whole device: nothing is enqueued any more, nobody waits any more, and
// status() says what went wrong first.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
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
};

// Makes a device the calling thread's current one for as long as it exists: most of CUDA's calls
// mean the current device.
class CudaCurrent {
 public:
  explicit CudaCurrent(int ordinal) {
    if (cudaGetDevice(&outer_) != cudaSuccess) outer_ = ordinal;
    result_ = outer_ == ordinal ? cudaSuccess : cudaSetDevice(ordinal);
    changed_ = outer_ != ordinal;
  }
  ~CudaCurrent() {
    if (changed_) cudaSetDevice(outer_);
  }
  CudaCurrent(const CudaCurrent&) = delete;
  CudaCurrent& operator=(const CudaCurrent&) = delete;
  cudaError_t result() const { return result_; }

 private:
  int outer_ = 0;
  bool changed_ = false;
  cudaError_t result_ = cudaSuccess;
};

}  // namespace ebb
