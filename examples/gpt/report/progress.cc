#include "report/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ebb/runtime/trace/log.h"
#include "report/output.h"
#include "run.h"

namespace ebb::gpt {
namespace {

constexpr int64_t kPlainLines = 20;
constexpr double kPlainLineSeconds = 60;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Bytes of memory: NVMe takes none, and the driver's bytes may be other processes'.
uint64_t BytesHeld(const Engine& engine) {
  uint64_t bytes = 0;
  for (const MemoryRow& row : engine.memory())
    if (row.tier != Tier::kNvme && row.state != StateClass::kDriver) bytes += row.current_bytes;
  return bytes;
}

// Whether `step`, the `nth` of this run, both from 0, ran the updates of the step before it, after
// buffers had been used before.
bool IsSteady(int64_t step, int64_t nth, int64_t evaluate_every) {
  return nth >= 2 && (evaluate_every == 0 || step % evaluate_every != 0);
}

// Whether a line on standard output can be rewritten. Open MPI gives each rank a terminal of its
// own, whose output mpirun copies into its standard output, which may be a file.
bool IsRewritable() {
  const char* const type = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && type != nullptr && *type != '\0' &&
         std::string_view(type) != "dumb" && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr;
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

int64_t History::WarmUp(int64_t steps) {
  return std::min(kWarmUp, steps / 2);
}

void History::Begin(int64_t resumed_steps, int64_t to_do) {
  resumed = finished = saved = resumed_steps;
  warm_up = resumed + WarmUp(to_do);
}

void History::Add(const StepRecord& record) {
  (finished < warm_up ? cold_seconds : warm_seconds) += record.seconds;
  ++finished;
  last = record.report;
  if (keeps_steps) steps.push_back(record);
}

double History::SecondsOfStep() const {
  const bool is_warm = finished > warm_up;
  const int64_t count = finished - (is_warm ? warm_up : resumed);
  return count > 0 ? (is_warm ? warm_seconds : cold_seconds) / static_cast<double>(count) : 0;
}

double History::TokensPerSecond() const {
  const double seconds = SecondsOfStep();
  return seconds > 0 ? static_cast<double>(tokens_per_step) / seconds : 0;
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
    line = absl::FormatTime("%Y-%m-%d %H:%M:%S  ", absl::Now(), absl::LocalTimeZone()) + line;
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

StepRecorder::StepRecorder(const Run& run, const Engine& engine, History& history,
                           Progress* progress)
    : engine_(engine),
      history_(history),
      progress_(progress),
      losses_(progress != nullptr && run.reports.losses ? &*run.reports.losses : nullptr),
      evaluate_every_(run.options.evaluate_every),
      saves_(!run.options.save_folder.empty()) {}

void StepRecorder::StartClock() {
  since_ = Now();
}

void StepRecorder::Take(const StepReport& report) {
  applied_[report.step % kRemembered] = report.applied;
  const double now = Now();
  const StepRecord record = {.report = report, .seconds = now - std::exchange(since_, now)};
  history_.Add(record);
  if (progress_ == nullptr) return;
  if (losses_ != nullptr) {
    if (losses_->is_direct()) progress_->Clear();
    TakeWritten(losses_->Add(record, history_.tokens_per_step));
  }
  progress_->Show(history_, BytesHeld(engine_));
  if (!std::isfinite(report.loss) && !std::exchange(warned_, true)) {
    LogWarning(absl::StrCat("the loss of step ", report.step, " is not a number",
                            report.applied ? "" : "; its update was skipped"));
  }
}

void StepRecorder::SyncLosses() {
  if (losses_ != nullptr) TakeWritten(losses_->Sync());
}

void StepRecorder::TakeWritten(const absl::Status& losses) {
  if (losses.ok()) return;
  if (saves_) {
    KeepOutputError(losses);
  } else if (!std::exchange(warned_of_losses_, true)) {
    LogWarning(absl::StrCat(losses.message(),
                            "; the run goes on, and tries the line again after each step"));
  }
}

void StepRecorder::TakeTraffic(int64_t step) {
  DecideTraffic();
  if (history_.traffic_is_steady) return;
  history_.traffic = engine_.traffic();
  if (IsSteady(step, step - history_.resumed, evaluate_every_)) candidate_ = step;
  DecideTraffic();
}

void StepRecorder::DecideTraffic() {
  if (candidate_ < 0 || candidate_ >= history_.finished) return;
  const int64_t number = std::exchange(candidate_, -1) + 1;  // in its report
  history_.traffic_is_steady =
      applied_[number % kRemembered] && applied_[(number - 1) % kRemembered];
}

}  // namespace ebb::gpt
