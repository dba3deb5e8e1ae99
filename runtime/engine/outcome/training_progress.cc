#include "ebb/runtime/engine/outcome/training_progress.h"

#include <algorithm>
#include <cmath>

namespace ebb {

TrainingProgress::TrainingProgress(const Config& config)
    : config_(config), scaler_(config.loss_scale, config.compute) {}

StepScalars TrainingProgress::ScalarsFor(std::optional<double> learning_rate, double gradient_scale,
                                         double norm) const {
  StepScalars scalars{.apply = true, .step = applied_ + 1};
  double factor = gradient_scale / scaler_.scale();
  if (config_.gradient_clipping > 0)
    factor /= std::max(1.0, (norm + 1e-6) / config_.gradient_clipping);
  scalars.gradient_factor = static_cast<float>(factor);
  scalars.rates = optim::RatesAt(config_.scheduler, config_.optimizer.learning_rate, applied_);
  scalars.rate_of_step = learning_rate.has_value();
  if (scalars.rate_of_step) scalars.rates.learning_rate = *learning_rate;
  return scalars;
}

StepScalars TrainingProgress::Early(std::optional<double> learning_rate) const {
  StepScalars scalars = ScalarsFor(learning_rate, /*gradient_scale=*/1, /*norm=*/0);
  scalars.apply = cause_ == 0;
  return scalars;
}

Judgement TrainingProgress::Judge(const StepTerms& step, const Verdict& ranks) {
  Judgement judged;
  const bool finite = std::isfinite(ranks.squares);
  const bool known = ranks.known >= cause_;
  const bool held_back = cause_ > 0 && (!known || (step.early && !step.early_applied));
  judged.failed = held_back || !ranks.error.ok() || ranks.other_scopes >= 0 ||
                  ranks.other_rates >= 0 || (!finite && !config_.checks_overflow());
  judged.cause = held_back ? cause_ : step.exchange;
  if (known || !held_back) cause_ = 0;
  if (judged.failed && !held_back && !step.waits && !ranks.returned) cause_ = judged.cause;
  if (judged.failed) return judged;

  const double norm = std::sqrt(ranks.squares) / scaler_.scale() * step.gradient_scale;
  const StepScalars scalars = ScalarsFor(step.learning_rate, step.gradient_scale, norm);
  if (finite) judged.scalars = scalars;
  StepReport& report = judged.report;
  report.step = ++finished_;
  report.applied = finite;
  report.skipped_steps = skipped_ += finite ? 0 : 1;
  report.loss = ranks.loss / step.divisor * step.gradient_scale;
  report.gradient_norm = norm;
  report.loss_scale = scaler_.scale();
  report.learning_rate = scalars.rates.learning_rate;
  if (finite) ++applied_;
  scaler_.Update(!finite);
  judged.next_loss_scale = scaler_.scale();
  judged.at_minimum = scaler_.at_minimum();
  return judged;
}

TrainingState TrainingProgress::state() const {
  return {.finished_steps = finished_,
          .applied_steps = applied_,
          .skipped_steps = skipped_,
          .loss_scaler = scaler_.state()};
}

void TrainingProgress::Resume(const TrainingState& state) {
  finished_ = state.finished_steps;
  applied_ = state.applied_steps;
  skipped_ = state.skipped_steps;
  scaler_.Resume(state.loss_scaler);
}

}  // namespace ebb
