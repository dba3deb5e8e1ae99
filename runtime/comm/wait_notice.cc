#include "ebb/runtime/comm/wait_notice.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

WaitNotice::WaitNotice(const NoticeTimes& times, Clock::time_point begin)
    : times_(times), begin_(begin), due_(DeadlineAfter(times.first_seconds, begin)) {}

std::optional<double> WaitNotice::Take(Clock::time_point now) {
  if (now < due_) return std::nullopt;
  // Counted from now, so that the next line does not directly follow a late one.
  due_ = DeadlineAfter(times_.interval_seconds, now);
  return std::chrono::duration<double>(now - begin_).count();
}

void LogWaiting(std::string_view waiting, double seconds, std::string_view waits, double time_out,
                std::string_view more) {
  LogWarning(absl::StrCat(NameView(waiting), " has waited ",
                          seconds < 1 ? seconds : std::round(seconds), " s of at most ", time_out,
                          " s ", NameView(waits), more.empty() ? "" : ": ", NameView(more)));
}

}  // namespace ebb
