#include "ebb/offload/refusals.h"

#include <cerrno>

namespace ebb {
namespace {

int64_t Nanoseconds(Refusals::Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

Refusals& Refusals::OfProcess() {
  static Refusals* const all = new Refusals();  // queues of static objects may outlive it otherwise
  return *all;
}

bool Refusals::Refused(Clock::time_point now) {
  const int64_t at = Nanoseconds(now.time_since_epoch());
  const int64_t before = last_.exchange(at, std::memory_order_relaxed);
  int64_t since = since_.load(std::memory_order_relaxed);
  if (since == 0 || at - before > Nanoseconds(kForgottenAfter)) {
    since_.store(at, std::memory_order_relaxed);
    return false;
  }
  return at - since >= Nanoseconds(kPatience);
}

bool MayBeTakenLater(int error) {
  return error == EINTR || error == EAGAIN || error == ENOMEM;
}

}  // namespace ebb
