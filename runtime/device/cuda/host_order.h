// How streams of one CUDA device and its host streams wait for each other.
//
//   device waits for host   a host stream counts its records in locked memory, where a stream of
//                           the device waits for the count (cuStreamWaitValue64)
//   host waits for device   a CUDA stream of the host stream's own, its crossing, waits for the
//                           event; a host function behind that counts, and the host's thread waits
//                           for the count
//
// All counts only grow and belong to the device's shared state. A new stream reuses the count of a
// destroyed one, so nothing that is enqueued refers to a destroyed event or to freed memory.
//
// Several streams may share a queue of the hardware, which a wait blocks. The wait would block for
// good if its record came later in the same queue. It does not: a record, with all that it depends
// on in this process, is enqueued before any wait for it. The other streams of the queue are
// delayed, though; docs/ranks.md says how to get more queues. An operation of NCCL depends on
// operations of other ranks, which may come later. So ranks that are threads on one device and use
// NCCL need a queue for every stream (docs/ranks.md).
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
#include "ebb/runtime/device/cpu/cpu_device.h"
#include "ebb/runtime/device/cpu/cpu_event.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class CudaContext;

class HostOrder {
 public:
  // A thread with a queue. Streams of the device can wait for its records.
  absl::StatusOr<std::unique_ptr<CpuStream>> NewThread(const CudaContext& context,
                                                       std::string_view name, int tasks_max,
                                                       std::shared_ptr<ThreadTeam> team);
  // `place`: in such a thread's queue.
  cudaError_t EnqueueWait(cudaStream_t stream, const CpuEvent::Place& place) const;
  // Counts of the records that have crossed from the device to the host.
  TicketPool& crossings() { return crossings_; }

 private:
  using StreamWaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);

  absl::Status FindStreamWaitValue(const CudaContext& context);
  absl::Status AddCounts(const CudaContext& context);

  std::mutex mutex_;  // only one thread at a time makes a stream
  StreamWaitValue stream_wait_value_ = nullptr;
  std::vector<Buffer> locked_;
  const std::shared_ptr<TicketPool> records_ = std::make_shared<TicketPool>();
  TicketPool crossings_;
};

}  // namespace ebb
