// Where threads sleep until a condition has become true: an event count over a futex. Notifying
// costs two atomic operations, and no system call while no thread sleeps. A waiter spins for at
// most a few microseconds before it sleeps, so hundreds of waiting threads on a few cores cost
// nothing. The condition itself lives in the caller's atomics. With Scope::kProcesses it serves the
// threads of all processes that share its memory.
//
//   waiter:    point.Await([&] { return ready.load(std::memory_order_acquire); });
//   notifier:  ready.store(true, std::memory_order_release);  point.Notify();
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ebb {

class WaitPoint {
 public:
  enum class Scope : uint8_t { kThreads, kProcesses };
  using Clock = std::chrono::steady_clock;
  using Deadline = Clock::time_point;
  static constexpr Deadline kNever = Deadline::max();
  // A wake-up through the kernel costs up to 20 us on a virtual machine; spinning is cheaper if the
  // condition is about to hold.
  static constexpr std::chrono::nanoseconds kSpin{1500};

  explicit WaitPoint(Scope scope = Scope::kThreads) : scope_(scope) {}

  // True once `condition()` holds; false if the deadline passes first. `condition` may run any
  // number of times.
  template <class Condition>
  bool Await(Condition condition, Deadline deadline = kNever,
             std::chrono::nanoseconds spin = kSpin) {
    if (condition()) return true;
    if (spin.count() > 0) {
      const Deadline spin_end = Clock::now() + spin;
      do {
        Pause();
        if (condition()) return true;
      } while (Clock::now() < spin_end);
    }
    for (;;) {
      // The epoch is read before the condition, so a notification after this read ends the sleep
      // below.
      const uint32_t seen = epoch_.load(std::memory_order_seq_cst);
      if (condition()) return true;
      if (!Sleep(seen, deadline)) return condition();
    }
  }

  // Makes every waiter look again. Store what makes their conditions true before this call.
  void Notify() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) Wake();
  }

 private:
  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  // Sleeps while the epoch is `seen`. False: the deadline has passed.
  bool Sleep(uint32_t seen, Deadline deadline);
  void Wake();

  std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> sleepers_{0};
  const Scope scope_;
};

}  // namespace ebb
