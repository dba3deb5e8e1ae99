#include "ebb/runtime/engine/ranks/watchdog.h"

#include <system_error>
#include <utility>

#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

Watchdog::Watchdog(Communicator& communicator, double seconds, absl::Status why) {
  const WaitPoint::Deadline deadline = DeadlineAfter(seconds);
  try {
    thread_ = std::thread([this, &communicator, deadline, why = std::move(why)] {
      if (!end_.Await([this] { return ended_.load(std::memory_order_acquire); }, deadline))
        communicator.Abort(why);
    });
  } catch (const std::system_error&) {
    LogWarning(
        "no thread can be started, so this rank may wait up to the time limit for other ranks "
        "after an error");
  }
}

Watchdog::~Watchdog() {
  ended_.store(true, std::memory_order_release);
  end_.Notify();
  if (thread_.joinable()) thread_.join();
}

}  // namespace ebb
