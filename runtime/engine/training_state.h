// What a run is beside its tensors. Together with the masters (or parameters) and the optimizer's states,
// which Engine::Read gives and Engine::Write takes, it resumes a run bit for bit. The learning-rate
// schedule has no state of its own: its place is applied_steps. The trainer keeps its place in the data.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ebb/optim/loss_scaler.h"

namespace ebb {

struct TrainingState {
  int64_t finished_steps = 0;  // applied or skipped; StepReport::step of the last one
  int64_t applied_steps = 0;   // the place of schedules and of Adam's bias correction
  int64_t skipped_steps = 0;   // because of an overflow
  // Of fp16 with a dynamic scale. Else it says what the scale is, and what is set is not looked at.
  optim::LossScalerState loss_scaler = {};

  friend bool operator==(const TrainingState&, const TrainingState&) = default;
};

// kInvalidArgument says which value no run can have.
absl::Status Validate(const TrainingState& state);

}  // namespace ebb
