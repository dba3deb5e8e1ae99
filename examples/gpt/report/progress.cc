#include "report/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/trace/log.h"
#include "report/standard_output.h"

namespace ebb::gpt {
namespace {

constexpr int64_t kPlainLines = 20;  // about as many lines, where the line is not rewritten

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

Progress::Progress(int64_t steps)
    : steps_(steps),
      every_(std::max<int64_t>(1, steps / kPlainLines)),
      terminal_(isatty(STDOUT_FILENO) == 1) {
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
  const int64_t done = history.finished;
  if (!terminal_ && done != 1 && done != steps_ && done % every_ != 0) return;
  std::string line = ProgressLine(history, steps_, memory_bytes);
  if (terminal_) line.resize(std::min(line.size(), LineMax()));
  const std::lock_guard lock(mutex_);
  Print(terminal_ ? absl::StrCat("\r", line, "\x1b[K") : absl::StrCat(line, "\n"));
  open_ = terminal_;
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
