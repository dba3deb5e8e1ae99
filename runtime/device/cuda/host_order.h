// How streams of one CUDA device and its host streams wait for each other.
//
//   device waits for host   a host stream counts its records in locked memory, where a stream of
//                           the device waits for the count (cuStreamWaitValue64)
//   host waits for device   a CUDA stream of the host stream's own, its crossing, waits for the
//                           event; a host function behind that counts, and the host's thread waits
//                           for the count
//
// All counts only grow and belong to the device's shared state: one that a stream has left behind
// goes on under the next, so nothing that is enqueued refers to an event or to memory that is gone.
//
// A wait that blocks a queue of the hardware, which several streams may share, blocks for good only
// if what it waits for is behind it there. It is not: a record is enqueued, with all that it
// depends on in this process, before a wait for it is. What shares the queue is late, though:
// docs/ranks.md says how there are more. And an operation of NCCL's depends on those of other ranks,
// which may come later; ranks that are threads on one device and that NCCL connects need a queue for
// every stream (docs/ranks.md).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/cpu/cpu_event.h"
#include "ebb/runtime/device/cpu/cpu_stream.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class CudaContext;

class HostOrder {
 public:
  // A thread with a queue whose records streams of the device can wait for.
  absl::StatusOr<std::unique_ptr<CpuStream>> NewThread(const CudaContext& context,
                                                       std::string_view name, int tasks_max,
                                                       std::shared_ptr<ThreadTeam> team);
  // `place` is in such a thread.
  cudaError_t EnqueueWait(cudaStream_t stream, const CpuEvent::Place& place) const;
  // Counts of what has crossed from the device to the host.
  ProgressPool& crossings() { return crossings_; }

 private:
  using StreamWaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);

  absl::Status FindStreamWaitValue(const CudaContext& context);
  absl::Status AddCounts(const CudaContext& context);

  std::mutex mutex_;  // one thread at a time makes a stream
  StreamWaitValue stream_wait_value_ = nullptr;
  std::vector<Buffer> locked_;
  const std::shared_ptr<ProgressPool> records_ = std::make_shared<ProgressPool>();
  ProgressPool crossings_;
};

}  // namespace ebb
