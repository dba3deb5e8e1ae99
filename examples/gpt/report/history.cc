#include "report/history.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"
#include "report/progress.h"
#include "report/standard_output.h"
#include "run.h"

namespace ebb::gpt {
namespace {

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
