#include "report/history.h"

#include <algorithm>

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

}  // namespace ebb::gpt
