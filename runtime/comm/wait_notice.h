// When a rank that waits for others logs it: after a few seconds, and then once a minute. A wait
// may be legal for hours, up to its time-out. Until it ends, the log says which ranks are missing.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class WaitNotice {
 public:
  using Clock = WaitPoint::Clock;

  explicit WaitNotice(const NoticeTimes& times, Clock::time_point begin = Clock::now());
  // When the next line is due.
  WaitPoint::Deadline due() const { return due_; }
  // The seconds waited so far, if a line is due by `now`; the line then counts as logged.
  std::optional<double> Take(Clock::time_point now = Clock::now());

 private:
  const NoticeTimes times_;
  const Clock::time_point begin_;
  WaitPoint::Deadline due_;
};

// Logs the line. `waits` is all of it but the time: "rank 0 has waited 5 s " + "for rank 1 in ...".
// `time_out`: in seconds. `more`: what else is known, or "".
void LogWaiting(std::string_view waiting, double seconds, std::string_view waits, double time_out,
                std::string_view more);

// When a rank that waits looks whether it waits in vain: well before the first line.
inline NoticeTimes TimesOfLooks(const NoticeTimes& lines) {
  constexpr double kLooksBeforeLine = 5;
  const double seconds = lines.first_seconds / kLooksBeforeLine;
  return {.first_seconds = seconds, .interval_seconds = seconds};
}

// point.Await(condition, deadline, spin), which calls `log_wait(seconds)` whenever a line is due,
// and `look()` as TimesOfLooks says.
template <class Condition, class LogWait, class Look = void (*)()>
bool AwaitAndLog(
    WaitPoint& point, Condition condition, WaitPoint::Deadline deadline,
    std::chrono::nanoseconds spin, const NoticeTimes& times, LogWait log_wait, Look look = [] {}) {
  if (condition()) return true;
  WaitNotice notice(times), looking(TimesOfLooks(times));
  for (;;) {
    if (point.Await(condition, std::min({deadline, notice.due(), looking.due()}), spin))
      return true;
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (now >= deadline) return condition();
    if (looking.Take(now).has_value()) look();
    if (const std::optional<double> seconds = notice.Take(now)) log_wait(*seconds);
    spin = std::chrono::nanoseconds(0);
  }
}

}  // namespace ebb
