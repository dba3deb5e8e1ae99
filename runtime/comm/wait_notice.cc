#include "ebb/runtime/comm/wait_notice.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

WaitPoint::Deadline After(WaitPoint::Clock::time_point begin, double seconds) {
  constexpr double kForEver = 1e9;  // 31 years
  if (!(seconds < kForEver)) return WaitPoint::kNever;
  return begin + std::chrono::duration_cast<WaitPoint::Clock::duration>(
                     std::chrono::duration<double>(seconds));
}

}  // namespace

WaitNotice::WaitNotice(const NoticeTimes& times, Clock::time_point begin)
    : times_(times), begin_(begin), due_(After(begin, times.first_seconds)) {}

std::optional<double> WaitNotice::Take(Clock::time_point now) {
  if (now < due_) return std::nullopt;
  // Counted from now, so that the next line does not directly follow a late one.
  due_ = After(now, times_.interval_seconds);
  return std::chrono::duration<double>(now - begin_).count();
}

void LogWaiting(std::string_view waiting, double seconds, std::string_view waits, double time_out,
                std::string_view more) {
  const auto text = [](std::string_view view) {
    return absl::string_view(view.data(), view.size());
  };
  LogWarning(absl::StrCat(text(waiting), " has waited ",
                          seconds < 1 ? seconds : std::round(seconds), " s of at most ", time_out,
                          " s ", text(waits), more.empty() ? "" : ": ", text(more)));
}

}  // namespace ebb
