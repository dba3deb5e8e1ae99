#include "ebb/runtime/engine/displaced_units.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/conflicts.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/residency.h"

namespace ebb {

void DisplacedUnits::Open(OpenScope& scope) {
  const sharding::Plan& plan = with_.progress->plan();
  if (with_.runner->UpdateHasStarted(scope.unit)) {
    with_.errors->Note(absl::FailedPreconditionError(absl::StrCat(
        with_.messages->ScopeName(scope.kind, scope.unit),
        " after the unit's update of this step has started, so its parameters are the next step's: "
        "open it before its last Backward, or set ebb.asynchronous_step to late")));
    return with_.order->Fence();
  }
  if (sharding::IsKeptWhole(plan, scope.unit)) return with_.order->Fence();
  const bool shown = std::any_of(with_.progress->open.begin(), with_.progress->open.end(),
                                 [&](const OpenScope& other) { return other.unit == scope.unit; });
  if (shown || IsGathered(scope.unit)) {
    return with_.order->Fence();
  }
  if (!HasRoom(scope, /*all=*/true)) return;
  scope.displaces = true;
  Gather(scope.unit);
}

void DisplacedUnits::Close(const OpenScope& scope) {
  if (scope.displaces) {
    with_.views->Poison(scope.unit);
    const sharding::Plan& plan = with_.progress->plan();
    for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
      // What another one displaces still, that one brings back.
      const bool displaced = std::any_of(
          with_.progress->open.begin(), with_.progress->open.end(), [&](const OpenScope& other) {
            return other.displaces && sharding::GathersConflict(plan, unit, other.unit);
          });
      if (!displaced && sharding::GathersConflict(plan, unit, scope.unit) && IsGathered(unit))
        Gather(unit);
    }
  }
  with_.order->Fence();
}

// Whether a gather has brought the unit, or brings it, for a scope that is not over.
bool DisplacedUnits::IsGathered(int unit) const {
  const StepProgress& progress = *with_.progress;
  const sharding::Plan& plan = progress.plan();
  // The planned rounds as if those in the middle that are over had been one.
  const int round = progress.RoundOf(progress.moment),
            before = (round - progress.RoundInPlan(round)) * progress.scopes_of_round();
  for (int s = 0; s < static_cast<int>(plan.scopes.size()); ++s) {
    const int gather = plan.gather_of_scope[s];
    if (plan.scopes[s].unit == unit && gather >= 0 &&
        progress.fragment->fragment().instruction_of[gather] < with_.runner->issued() &&
        !progress.order.is_over(before + s))
      return true;
  }
  return false;
}

bool DisplacedUnits::HasRoom(const OpenScope& scope, bool all) {
  const auto other = std::find_if(
      with_.progress->open.begin(), with_.progress->open.end(), [&](const OpenScope& open) {
        return (all || open.displaces) &&
               sharding::GathersConflict(with_.progress->plan(), scope.unit, open.unit);
      });
  if (other == with_.progress->open.end()) return true;
  with_.errors->Note(absl::FailedPreconditionError(absl::StrCat(
      with_.messages->ScopeName(scope.kind, scope.unit), " while ",
      with_.messages->ScopeName(other->kind, other->unit),
      " is open: the gather pool has room for both only one after the other; close the first, or "
      "raise ebb.prefetch_depth")));
  with_.order->Fence();
  return false;
}

// Between all that was issued and all that comes.
void DisplacedUnits::Gather(int unit) {
  with_.order->Fence();
  with_.state->GatherUnit(unit);
  with_.order->Fence();
}

}  // namespace ebb
