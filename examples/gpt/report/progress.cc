#include "report/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/trace/log.h"
#include "report/standard_output.h"

namespace ebb::gpt {
namespace {

constexpr int64_t kPlainLines = 20;
constexpr double kPlainLineSeconds = 60;

// Whether a line on standard output can be rewritten. Open MPI gives each rank a terminal of its
// own, whose output mpirun copies into its standard output, which may be a file.
bool IsRewritable() {
  const char* const type = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && type != nullptr && *type != '\0' &&
         std::string_view(type) != "dumb" && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr;
}

std::string DateAndTime() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  return absl::StrFormat("%d-%02d-%02d %02d:%02d:%02d", local.tm_year + 1900, local.tm_mon + 1,
                         local.tm_mday, local.tm_hour, local.tm_min, local.tm_sec);
}

std::string Duration(double seconds) {
  const int64_t whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return absl::StrFormat("%ds", whole);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
}

std::string Milliseconds(double seconds) {
  const double milliseconds = 1e3 * seconds;
  return milliseconds < 10 ? absl::StrFormat("%.1f ms", milliseconds)
                           : absl::StrFormat("%.0f ms", milliseconds);
}

// One column less than the terminal has, because a full line would wrap, and \r would return to its
// last row.
size_t LineMax() {
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 2) return std::string::npos;
  return size.ws_col - 1u;
}

}  // namespace

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

PlainLines::PlainLines(int64_t steps)
    : steps_(steps), every_(std::max<int64_t>(1, steps / kPlainLines)) {}

std::optional<double> PlainLines::Due(int64_t done, double now) {
  const bool first = last_done_ < 0;
  const double since = now - last_time_;
  if (!first && done != steps_ && done % every_ != 0 && since < kPlainLineSeconds)
    return std::nullopt;
  // Within less than a second the rate would be that of a burst of reports.
  const double rate = first || since < 1 ? 0 : static_cast<double>(done - last_done_) / since;
  last_done_ = done;
  last_time_ = now;
  return rate;
}

Progress::Progress(int64_t steps) : steps_(steps), terminal_(IsRewritable()), plain_lines_(steps) {
  SurroundLogLines([this](const std::function<void()>& write) {
    const std::lock_guard lock(mutex_);
    if (open_) Print("\r\x1b[K");
    open_ = false;
    write();
  });
}

Progress::~Progress() {
  SurroundLogLines({});
  if (open_) Print("\n");
}

void Progress::Show(const History& history, uint64_t memory_bytes) {
  const std::optional<double> rate = terminal_ ? 0 : plain_lines_.Due(history.finished, Now());
  if (!rate) return;
  std::string line = ProgressLine(history, steps_, memory_bytes);
  if (terminal_) {
    line.resize(std::min(line.size(), LineMax()));
  } else {
    line = absl::StrCat(DateAndTime(), "  ", line);
  }
  if (*rate > 0) {
    absl::StrAppendFormat(&line, "  %.0f tokens/s since the last line",
                          *rate * static_cast<double>(history.tokens_per_step));
  }
  const std::lock_guard lock(mutex_);
  Print(terminal_ ? absl::StrCat("\r", line, "\x1b[K") : absl::StrCat(line, "\n"));
  open_ = terminal_;
}

void Progress::Clear() {
  const std::lock_guard lock(mutex_);
  if (open_) Print("\r\x1b[K");
  open_ = false;
}

void Progress::Say(const std::string& line) {
  const std::lock_guard lock(mutex_);
  Print(open_ ? absl::StrCat("\r", line, "\x1b[K\n") : absl::StrCat(line, "\n"));
  open_ = false;
}

std::string ProgressLine(const History& history, int64_t steps, uint64_t memory_bytes) {
  const StepReport& report = history.last;
  const double of_step = history.SecondsOfStep();
  std::string line =
      absl::StrFormat("step %d/%d  loss %.4f  %s a step  %.0f tokens/s  %.1f MiB a rank",
                      history.finished, steps, report.loss, Milliseconds(of_step),
                      history.TokensPerSecond(), static_cast<double>(memory_bytes) / (1 << 20));
  if (history.scales_loss) absl::StrAppendFormat(&line, "  loss scale %g", report.loss_scale);
  if (report.skipped_steps > 0) absl::StrAppendFormat(&line, "  skipped %d", report.skipped_steps);
  const double left = of_step * static_cast<double>(steps - history.finished);
  return line + "  " + Duration(left) + " left";
}

std::string Printable(const std::string& text) {
  std::string printable;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == '\n' || (byte >= 0x20 && byte < 0x7f)) {
      printable += c;
    } else {
      absl::StrAppendFormat(&printable, "\\x%02x", byte);
    }
  }
  return printable;
}

}  // namespace ebb::gpt
