// Waiting for other ranks on a communicator for a shorter time than its own time-out: where that has
// been waited out once, what they have to say about it is not worth another.
#pragma once

#include <atomic>
#include <thread>

#include "absl/status/status.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class Watchdog {
 public:
  // Aborts `communicator`, which is borrowed, with `why` unless this object has ended within
  // `seconds`. Where the machine has no thread for it, the communicator's time-out stays.
  Watchdog(Communicator& communicator, double seconds, absl::Status why);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::atomic<bool> ended_{false};
  WaitPoint end_;
  std::thread thread_;
};

}  // namespace ebb
