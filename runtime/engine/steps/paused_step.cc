#include "ebb/runtime/engine/steps/paused_step.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ebb {

absl::Status PausedStep::MayEvaluate() const {
  if (with_.progress->evaluation) {
    return absl::FailedPreconditionError(
        "BeginEvaluation while another Evaluation of the same engine is alive: finish or drop that "
        "one first");
  }
  if (!with_.progress->open.empty()) {
    const OpenScope& open = with_.progress->open.front();
    return absl::FailedPreconditionError(
        absl::StrCat("BeginEvaluation while ", with_.messages->ScopeName(open.kind, open.unit),
                     " of a Step of the same engine is open: close that scope first"));
  }
  const sharding::Plan& plan = with_.progress->plan();
  if (with_.notices->OwnsBoundaries() &&
      with_.progress->order.next() % with_.progress->scopes_of_round() != 0) {
    return absl::FailedPreconditionError(
        "BeginEvaluation within a round of a Step: both use the same memory for boundary "
        "activations (Visit::output_bytes). Evaluate between rounds, or between steps");
  }
  for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
    if (!with_.runner->UpdateHasStarted(unit)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("BeginEvaluation in a Step after the update of unit '", plan.unit_names[unit],
                     "' has started, so parameters of two steps would be shown: evaluate before "
                     "the last round's first Backward, or set ebb.asynchronous_step to late"));
  }
  return absl::OkStatus();
}

void PausedStep::Pause() {
  with_.scopes->views().TakeErrors();
  // The evaluation sees finished updates. The step then reads from the disk what carried updates
  // would have left in slots.
  with_.runner->FinishCarried();
  with_.order->WaitForSteps();
  std::swap(*with_.progress, outer_);
}

void PausedStep::Resume() {
  std::swap(*with_.progress, outer_);
  with_.view_errors->Begin(with_.scopes->last());
  if (!misuse_.ok()) with_.errors->Note(std::exchange(misuse_, absl::OkStatus()));
  with_.runner->ReserveSpans();
  with_.order->WaitForSteps();
  with_.runner->BringAgain();
}

void PausedStep::Misuse(std::string_view call) {
  if (!misuse_.ok()) return;
  misuse_ = absl::FailedPreconditionError(
      absl::StrCat(std::string(call),
                   " of a Step while an Evaluation in it is alive: finish or drop that one first"));
}

}  // namespace ebb
