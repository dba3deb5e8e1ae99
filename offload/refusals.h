// How long the system has refused every request that it may take when it is repeated (EAGAIN, EINTR,
// ENOMEM). One object for a queue, and one for all queues of the process: what is refused for ever
// ends one wait, and not one wait for each queue behind the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ebb {

class Refusals {
 public:
  using Clock = std::chrono::steady_clock;
  // So long may all be refused.
  static constexpr std::chrono::seconds kPatience{1};
  // A refusal that is so much older than the next one has nothing to do with it.
  static constexpr std::chrono::seconds kForgottenAfter{10};

  // Of all queues of the process.
  static Refusals& OfProcess();

  // The system has moved something. Any thread.
  void Moved() {
    // Seldom anything but 0, and a store takes the cache line from other queues.
    if (since_.load(std::memory_order_relaxed) != 0) since_.store(0, std::memory_order_relaxed);
  }
  // The system has refused something. True: nothing has moved for longer than kPatience. Any thread.
  bool Refused(Clock::time_point now = Clock::now());

 private:
  std::atomic<int64_t> since_{0};  // nanoseconds of the clock; 0: something has moved
  std::atomic<int64_t> last_{0};
};

// Whether the system says by `error`, an errno, that it may take the same later.
bool MayBeTakenLater(int error);

}  // namespace ebb
