#include "ebb/runtime/engine/training_state.h"

#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {
namespace {

// The same on all ranks that set the same.
int64_t SubjectOf(const TrainingState& state) {
  const optim::LossScalerState& scaler = state.loss_scaler;
  sharding::Hasher hasher;
  hasher.Add(state.finished_steps).Add(state.applied_steps).Add(state.skipped_steps);
  hasher.Add(std::bit_cast<int64_t>(scaler.scale));
  hasher.Add(scaler.clean_steps).Add(scaler.hysteresis_left);
  return static_cast<int64_t>(hasher.hash());
}

}  // namespace

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

absl::StatusOr<TrainingState> Executor::training_state() {
  EBB_RETURN_IF_ERROR(Settle());
  return outcome_->training_state();
}

absl::Status Executor::SetTrainingState(const TrainingState& state) {
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        "SetTrainingState while a Step or Evaluation of the engine is alive: finish or drop it "
        "first");
  }
  calls_.Note(CallKind::kSetTrainingState);
  absl::Status own = Settle();
  if (own.ok()) own = Validate(state);
  // A carried update is of the steps that were counted so far.
  Drain();
  AwaitStreams();
  EBB_RETURN_IF_ERROR(Meet(Meeting::kSetTrainingState, SubjectOf(state), own));
  outcome_->SetTrainingState(state);
  return absl::OkStatus();
}

}  // namespace ebb
