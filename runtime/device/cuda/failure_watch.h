// Notices that a device has failed while threads of host streams wait for it, on a thread of its own.
//
//   host stream's thread   waits for what crosses ... still waits: Look() -> waits
//   the watch              asks CUDA how the crossings are: an error fails the device, and so
//                          wakes all
//
// A host stream's thread itself asks nothing of CUDA, here or in a task. A call of CUDA may wait for
// a lock of the driver's; another thread may hold that in a call that waits for the device, as
// cudaFree does; and the device may be waiting for what this host stream has to do next. The same
// holds for CUDA's own thread that runs host functions (host_tasks.h). What these threads may do:
// compute, read and write memory of the host, wait for files and for other host streams, count what
// the device waits for in locked memory, and note and read the device's status.
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

  // `name`: as errors say it.
  absl::Status Add(cudaStream_t crossing, const std::string& name);
  // Once it returns nothing is asked of the stream any more.
  void Remove(cudaStream_t crossing);
  // Soon. Calls nothing of CUDA.
  void Look();

 private:
  void Run();
  void AskAll();

  CudaContext& context_;
  std::mutex mutex_;  // held while CUDA is asked, so never taken by the threads that wait
  std::map<cudaStream_t, std::string> crossings_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> looks_{0};
  WaitPoint changed_;
  std::thread thread_;  // from the first crossing on
};

}  // namespace ebb
