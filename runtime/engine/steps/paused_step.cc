#include "ebb/runtime/engine/steps/paused_step.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/outcome/step_errors.h"

namespace ebb {

absl::Status PausedStep::MayEvaluate() const {
  if (progress_.evaluation) {
    return absl::FailedPreconditionError(
        "BeginEvaluation while another Evaluation of the same engine is alive: finish or drop that "
        "one first");
  }
  if (!progress_.open.empty()) {
    const OpenScope& open = progress_.open.front();
    return absl::FailedPreconditionError(
        absl::StrCat("BeginEvaluation while ", messages_.ScopeName(open.kind, open.unit),
                     " of a Step of the same engine is open: close that scope first"));
  }
  const sharding::Plan& plan = progress_.plan();
  if (notices_.OwnsBoundaries() && progress_.order.next() % progress_.scopes_of_round() != 0) {
    return absl::FailedPreconditionError(
        "BeginEvaluation within a round of a Step: both use the same memory for boundary "
        "activations (Visit::output_bytes). Evaluate between rounds, or between steps");
  }
  for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
    if (!runner_.UpdateHasStarted(unit)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("BeginEvaluation in a Step after the update of unit '", plan.unit_names[unit],
                     "' has started, so parameters of two steps would be shown: evaluate before "
                     "the last round's first Backward, or set ebb.asynchronous_step to late"));
  }
  return absl::OkStatus();
}

void PausedStep::Pause() {
  scopes_.views().TakeErrors();
  // The evaluation sees finished updates. The step then reads from the disk what carried updates
  // would have left in slots.
  runner_.FinishCarried();
  core_.order.WaitForSteps();
  std::swap(progress_, outer_);
}

void PausedStep::Resume() {
  std::swap(progress_, outer_);
  view_errors_.Begin(scopes_.last());
  if (!misuse_.ok()) core_.errors.Note(std::exchange(misuse_, absl::OkStatus()));
  runner_.ReserveSpans();
  core_.order.WaitForSteps();
  runner_.BringAgain();
}

void PausedStep::Misuse(std::string_view call) {
  if (!misuse_.ok()) return;
  misuse_ = absl::FailedPreconditionError(
      absl::StrCat(std::string(call),
                   " of a Step while an Evaluation in it is alive: finish or drop that one first"));
}

}  // namespace ebb
