// The host tasks of one CUDA stream: where they wait until CUDA calls them, in the stream's order.
//
//   enqueuer --> [ task | task | ... ] --> CUDA's callback thread    at most tasks_max wait
//
// CUDA drops the host functions of a device that has failed. Each task still runs exactly once,
// because RunAbandoned runs the dropped ones on the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class HostTasks {
 public:
  struct Place {
    Task task;
    HostTasks* owner = nullptr;
    std::atomic<bool> claimed{false};  // a thread runs it, or has run it
  };

  explicit HostTasks(int tasks_max);
  // Called only once all tasks have ended.
  ~HostTasks() = default;

  // Called by the enqueuing thread. Null: the queue was full until the deadline.
  Place* TryPut(const Task& task, WaitPoint::Deadline deadline);
  // CUDA calls it; `place` as returned by TryPut.
  static void Run(void* place);
  // Called by the enqueuing thread, once CUDA runs no task any more, or the device has failed.
  void RunAbandoned();

 private:
  bool RunUnclaimed(Place& place);

  const uint64_t tasks_max_;
  std::unique_ptr<Place[]> ring_;
  uint64_t put_ = 0;
  std::atomic<uint64_t> ended_{0};
  // Counted last: when it has caught up, no thread is inside this object any more.
  std::atomic<uint64_t> left_{0};
  WaitPoint not_full_;
};

}  // namespace ebb
