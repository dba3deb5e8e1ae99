// Notices, on a thread of its own, that a device has failed while threads of host streams wait for
// it.
//
//   host stream's thread   waits for what crosses ... still waits: Look() -> waits
//   the watch              asks CUDA how the crossings are: an error fails the device, and so
//                          wakes all
//
// A host stream's thread makes no call of CUDA, here or in a task. A call of CUDA may wait for a
// lock of the driver, which another thread may hold in a call that waits for the device, as
// cudaFree does. The device may be waiting for the host stream's next task. The same holds for
// CUDA's own thread that runs host functions (host_tasks.h). These threads may compute, read and
// write memory of the host, wait for files and for other host streams, count in locked memory what
// the device waits for, and note and read the device's status.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class CudaContext;

class FailureWatch {
 public:
  explicit FailureWatch(CudaContext& context) : context_(context) {}
  ~FailureWatch();

  // `name`: the stream's name in errors.
  absl::Status Add(cudaStream_t crossing, const std::string& name);
  // Once it returns no call uses the stream any more.
  void Remove(cudaStream_t crossing);
  // Makes the watch look soon. Makes no call of CUDA.
  void Look();

 private:
  void Run();
  void AskAll();

  CudaContext& context_;
  std::mutex mutex_;  // held during calls of CUDA, so threads that wait never take it
  std::map<cudaStream_t, std::string> crossings_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> looks_{0};
  WaitPoint changed_;
  std::thread thread_;  // started by the first crossing
};

}  // namespace ebb
