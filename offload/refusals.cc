#include "ebb/offload/refusals.h"

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace ebb {
namespace {

constexpr int64_t kNever = -1;
// The last time that this process gave up a thing, in ticks of the clock.
std::atomic<int64_t> last_given_up{kNever};

bool WasGivenUpLately(Refusals::Clock::time_point now) {
  const int64_t last = last_given_up.load(std::memory_order_relaxed);
  return last != kNever &&
         now.time_since_epoch() - Refusals::Clock::duration(last) < Refusals::kRemembered;
}

}  // namespace

bool Refusals::Refused(Clock::time_point now) {
  if (count_++ == 0) since_ = now;
  if (count_ <= kTriesMin) return false;
  if (now - since_ < kPatience) return WasGivenUpLately(now);
  last_given_up.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  return true;
}

void Refusals::ForgetGivenUp() {
  last_given_up.store(kNever, std::memory_order_relaxed);
}

bool MayBeTakenLater(int error) {
  return error == EINTR || error == EAGAIN || error == ENOMEM;
}

}  // namespace ebb
