#include "ebb/runtime/device/wait_point.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace ebb {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

uint32_t* Word(std::atomic<uint32_t>& word) {
  return reinterpret_cast<uint32_t*>(&word);
}

// The kernel finds a private futex by its address in this process alone, which is cheaper.
int Flags(int operation, WaitPoint::Scope scope) {
  return scope == WaitPoint::Scope::kThreads ? operation | FUTEX_PRIVATE_FLAG : operation;
}

}  // namespace

bool WaitPoint::Sleep(uint32_t seen, Deadline deadline) {
  timespec until = {};
  if (deadline != kNever) {
    // steady_clock is CLOCK_MONOTONIC, which FUTEX_WAIT_BITSET takes as an absolute time.
    const int64_t ns = std::chrono::nanoseconds(deadline.time_since_epoch()).count();
    until = {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const long result =
      syscall(SYS_futex, Word(epoch_), Flags(FUTEX_WAIT_BITSET, scope_), seen,
              deadline == kNever ? nullptr : &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  const bool timed_out = result != 0 && errno == ETIMEDOUT;
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return !timed_out;
}

void WaitPoint::Wake() {
  syscall(SYS_futex, Word(epoch_), Flags(FUTEX_WAKE, scope_), INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ebb
