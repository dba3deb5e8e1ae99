// Progress over all steps so far: applied steps, loss scale, held-back steps. It is the same on all
// ranks, because it follows from their records alone, in the order of the reduce stream.
//
//   Healthy -> Holding(cause) -> Healthy
//
// Suppose a step was rejected by an error that the Finish of some rank has not returned. Later
// steps, which were begun as if it had succeeded, are held back: none is applied until every rank's
// caller knows of the error. Early updates are held back too. They start before ranks tell each
// other anything, so the first step after that has none.
#pragma once

#include <cstdint>
#include <optional>

#include "ebb/optim/loss_scaler.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/training_state.h"

namespace ebb {

// Terms of a step before its verdict.
struct StepTerms {
  int64_t exchange = 0;       // ExchangeRecord::exchange
  bool waits = false;         // its Finish waits for the verdict
  bool early = false;         // it has updates that come before the verdict, ...
  bool early_applied = true;  // ... and these changed something
  double divisor = 1;
  std::optional<double> learning_rate = {};  // the step's own
  double gradient_scale = 1;
};

struct Judgement {
  bool failed = false;  // nothing of it is applied, and no step was finished
  int64_t cause = 0;    // the exchange of the error to blame, perhaps an earlier one
  StepReport report = {};
  StepScalars scalars = {};
  float next_loss_scale = 1;
  bool at_minimum = false;  // the loss scale is
};

class TrainingProgress {
 public:
  explicit TrainingProgress(const Config& config);

  // For updates before their step's verdict.
  StepScalars Early(std::optional<double> learning_rate) const;
  Judgement Judge(const StepTerms& step, const Verdict& ranks);

  float loss_scale() const { return scaler_.scale(); }
  TrainingState state() const;
  void Resume(const TrainingState& state);

 private:
  StepScalars ScalarsFor(std::optional<double> learning_rate, double gradient_scale,
                         double norm) const;

  const Config& config_;
  optim::LossScaler scaler_;
  int64_t finished_ = 0, applied_ = 0, skipped_ = 0;  // steps
  // The exchange of an error that some rank's caller may not know yet; 0: there is none.
  int64_t cause_ = 0;
};

}  // namespace ebb
