#include "report/history.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ebb::gpt {

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

std::string LossesCsv(const History& history) {
  std::string csv = "step,loss,gradient_norm,learning_rate,loss_scale,applied,tokens_per_second\n";
  for (const StepRecord& record : history.steps) {
    const StepReport& r = record.report;
    absl::StrAppendFormat(&csv, "%d,%.9g,%.9g,%.9g,%.9g,%d,%.1f\n", r.step, r.loss, r.gradient_norm,
                          r.learning_rate, r.loss_scale, r.applied,
                          static_cast<double>(history.tokens_per_step) / record.seconds);
  }
  return csv;
}

}  // namespace ebb::gpt
