// A wait for other ranks on a communicator that is shorter than the communicator's own time-out:
// once that time-out has passed, a second one would be too long.
#pragma once

#include <atomic>
#include <thread>

#include "absl/status/status.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class Watchdog {
 public:
  // Aborts `communicator` (borrowed) with `why` unless this object ends within `seconds`. If the
  // machine has no thread for it, the communicator's time-out stays.
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
