// The state of a run beside its tensors. With the masters (or parameters) and the optimizer's
// states, read by Engine::Read and written by Engine::Write, it resumes the run bit for bit. The
// learning-rate schedule's only state is applied_steps. The trainer keeps its place in the data.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ebb/optim/loss_scaler.h"

namespace ebb {

struct TrainingState {
  int64_t finished_steps = 0;  // applied or skipped; StepReport::step of the last one
  int64_t applied_steps = 0;   // the place of schedules and of Adam's bias correction
  int64_t skipped_steps = 0;   // because of an overflow
  // For fp16 with a dynamic scale. Otherwise it shows the scale, and setting it has no effect.
  optim::LossScalerState loss_scaler = {};

  friend bool operator==(const TrainingState&, const TrainingState&) = default;
};

// kInvalidArgument names a value that no run can have.
absl::Status Validate(const TrainingState& state);

}  // namespace ebb
