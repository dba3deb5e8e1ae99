#include "history.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ebb::gpt {

int64_t History::WarmUp(int64_t steps) {
  return std::min(kWarmUp, steps / 2);
}

double History::TokensPerSecond() const {
  const auto first = static_cast<size_t>(warm_up);
  const size_t warm = steps.size() > first ? first : 0;
  double seconds = 0;
  for (size_t i = warm; i < steps.size(); ++i) seconds += steps[i].seconds;
  return seconds > 0 ? static_cast<double>(tokens_per_step) *
                           static_cast<double>(steps.size() - warm) / seconds
                     : 0;
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
