// The first failure of a world, as far as this process knows it. It ends all communicators over MPI
// and NCCL. Any thread.
#pragma once

#include <atomic>
#include <mutex>

#include "absl/status/status.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class WorldFailure {
 public:
  // The first stays. Neither waits nor calls CUDA.
  void Set(const absl::Status& why) {
    {
      const std::scoped_lock lock(mutex_);
      status_.Update(why);
      is_set_.store(!status_.ok(), std::memory_order_release);
    }
    changed_.Notify();
  }
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  absl::Status Get() const {
    if (!is_set()) return absl::OkStatus();
    const std::scoped_lock lock(mutex_);
    return status_;
  }
  // Notified by a failure.
  WaitPoint& changed() { return changed_; }

 private:
  mutable std::mutex mutex_;
  absl::Status status_;
  std::atomic<bool> is_set_{false};
  WaitPoint changed_;
};

}  // namespace ebb
