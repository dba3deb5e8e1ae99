#include "ebb/runtime/engine/training_state.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace ebb {

absl::Status Validate(const TrainingState& state) {
  if (state.applied_steps < 0 || state.skipped_steps < 0 ||
      state.finished_steps - state.applied_steps != state.skipped_steps) {
    return absl::InvalidArgumentError(
        absl::StrCat("a training state of ", state.finished_steps, " finished steps, ",
                     state.applied_steps, " applied and ", state.skipped_steps,
                     " skipped: none may be negative, and each finished step is one of the two"));
  }
  const optim::LossScalerState& scaler = state.loss_scaler;
  if (!std::isnormal(static_cast<float>(scaler.scale)) || scaler.scale < 0 ||
      scaler.clean_steps < 0 || scaler.hysteresis_left < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a training state with the loss scale ", scaler.scale, ", ",
                     scaler.clean_steps, " clean steps and ", scaler.hysteresis_left,
                     " overflows left: the scale must be positive and an fp32 number, and the "
                     "others not negative"));
  }
  return absl::OkStatus();
}

}  // namespace ebb
