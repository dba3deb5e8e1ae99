// The host tasks of one CUDA stream: where they wait until CUDA calls them, in the stream's order.
//
//   enqueuer --> [ task | task | ... ] --> CUDA's callback thread    at most tasks_max wait
//
// CUDA forgets the host functions of a device that has failed. Each task runs exactly once all the
// same: RunAbandoned runs on the calling thread what CUDA will not.
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
    std::atomic<bool> claimed{false};  // somebody runs it, or has
  };

  explicit HostTasks(int tasks_max);
  // Only once all have ended.
  ~HostTasks() = default;

  // By the enqueuing thread. Null: full until the deadline.
  Place* TryPut(const Task& task, WaitPoint::Deadline deadline);
  // What CUDA calls; `place` as returned by TryPut.
  static void Run(void* place);
  // By the enqueuing thread, once CUDA runs none of them any more, or the device has failed.
  void RunAbandoned();

 private:
  bool RunUnclaimed(Place& place);

  const uint64_t tasks_max_;
  std::unique_ptr<Place[]> ring_;
  uint64_t put_ = 0;
  std::atomic<uint64_t> ended_{0};
  // Counted last of all: when it has caught up, no thread is inside this object any more.
  std::atomic<uint64_t> left_{0};
  WaitPoint not_full_;
};

}  // namespace ebb
