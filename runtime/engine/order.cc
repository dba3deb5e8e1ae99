// What the engine does where a trainer does not open the next scope of the declared order
// (sharding/order.h says what it means). The same on every rank, with one warning.
//
//   left out        its moments run as planned, so that the ranks' collectives stay paired; its
//                   gradient is zero
//   ahead of one    that is still open: it opens if all that its kernels wait for has been issued, as
//   held open       nothing is issued out of the plan's order
//   again           what the unit's memory holds by then is displaced: the unit is gathered alone, and
//                   when its scope closes, so is what is still to be used. The plan stands still between
//
// Where boundary activations belong to the engine all but the second are errors, since a chain with a
// hole has no meaning.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/conflicts.h"
#include "ebb/sharding/residency.h"

namespace ebb {

using sharding::Match;
using sharding::OperationKind;
using sharding::PlannedScope;

// `match`: of the scope that was opened just now.
void Executor::FollowOrder(const Match& match, sharding::ScopeKind kind, int unit) {
  if (match.kind == Match::kRefused) {
    return errors_.Note(absl::FailedPreconditionError(absl::StrCat(
        ScopeName(kind, unit), " ", absl::string_view(match.reason.data(), match.reason.size()))));
  }
  if (match.kind == Match::kAgain) {
    return WarnOfOrder(match.expected, ScopeName(kind, unit),
                       "the unit is gathered for this scope alone, and what is in its place again "
                       "behind it");
  }
  if (match.scope == match.expected) return;
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  // Head and loss fused into the last visit's backward; and what a trainer need not recompute.
  const bool fused = match.scope == match.expected + 1 &&
                     scopes[match.expected].kind() == sharding::ScopeKind::kForward &&
                     scopes[match.scope].backward;
  const bool kept = !OwnsBoundaries() &&
                    std::all_of(scopes.begin() + match.expected, scopes.begin() + match.scope,
                                [](const PlannedScope& scope) { return scope.recompute; });
  if (!fused && !kept)
    WarnOfOrder(match.expected, ScopeName(kind, unit),
                "what the order has before it is left out of this step");
  if (progress_.evaluation) return;
  progress_.backwards.LeftOut(match.expected, match.scope);
  CheckNothingLeftOut();
}

void Executor::LeaveOutRest() {
  const int first = progress_.order.LeaveOutRest(), count = progress_.order.scopes();
  if (first == count) return;
  progress_.backwards.LeftOut(first, count);
  CheckNothingLeftOut();
  if (errors_.Known().ok())
    WarnOfOrder(first, "the end of the step", "the rest is left out, with zero gradients");
}

void Executor::WarnOfOrder(int expected, std::string_view what_came, std::string_view how) {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  const std::string next = expected < static_cast<int>(scopes.size())
                               ? ScopeName(scopes[expected].kind(), scopes[expected].unit)
                               : "the end of the step";
  const std::string what =
      absl::StrCat(std::string(what_came), " where the declared order has ", next);
  if (OwnsBoundaries()) {
    errors_.Note(absl::FailedPreconditionError(
        absl::StrCat(what,
                     ": boundary activations belong to the engine (Visit::output_bytes), so every "
                     "visit must come in its order")));
  } else if (!warned_of_order_ && rank_ == 0) {
    LogWarning(absl::StrCat(options_.name, ": ", what, ": ", std::string(how), "; ",
                            sharding::kOrderDeclaredIn, " declares the order (said once)"));
  }
  warned_of_order_ = true;
}

bool Executor::OwnsBoundaries() const {
  return progress_.run->plan.pools.bytes[static_cast<int>(StateClass::kActivation)] > 0;
}

// Before anything is updated with what is incomplete. Where boundaries are the engine's, what is left
// out is an error in any step.
void Executor::CheckNothingLeftOut() {
  if (!config_.ebb.strict || progress_.options.may_leave_out || OwnsBoundaries()) return;
  if (absl::Status missing = progress_.backwards.Error(); !missing.ok())
    errors_.Note(std::move(missing));
}

// The plan's next moment is the close of a scope that is still open, but the trainer opens a later one.
void Executor::OpenAheadOfHeld(const OpenScope& scope) {
  if (!HasRoom(scope, /*all=*/false)) return;
  // The kernels of scopes ahead of it that are left out wait, too: what they wait for, those behind them on
  // the compute stream do not wait for again.
  const std::vector<sharding::FragmentMoment>& moments = progress_.fragment->fragment().moments;
  std::vector<size_t> to_start;
  for (size_t moment = progress_.moment; moment <= OpeningOf(scope.planned); ++moment) {
    const int kernels = moments[moment].kernels;
    if (kernels < 0 || progress_.awaited[moment]) continue;
    to_start.push_back(moment);
    for (int wait : (*progress_.fragment)[kernels].waits) {
      const sharding::Instruction& other = (*progress_.fragment)[wait];
      if (wait < issued() || other.code == sharding::Code::kKernels) continue;
      const bool gathers = other.role == OperationKind::kGather ||
                           other.role == OperationKind::kGatherSecondary ||
                           other.role == OperationKind::kFillSecondary;
      errors_.Note(absl::FailedPreconditionError(
          absl::StrCat(ScopeName(scope.kind, scope.unit), " while ", HeldScope(),
                       " is open, behind which the ", std::string(sharding::Name(other.role)),
                       " of what it needs comes: close that scope first",
                       gathers ? ", or raise ebb.prefetch_depth" : "")));
      return issuer_->Fence();
    }
  }
  for (size_t moment : to_start) {
    progress_.awaited[moment] = 1;
    issuer_->StartKernels(*progress_.fragment, moments[moment].kernels, TagOf());
  }
}

// What holds the plan back.
std::string Executor::HeldScope() const {
  for (const OpenScope& open : open_)
    if (open.planned < 0) return ScopeName(open.kind, open.unit);
  const sharding::Plan& plan = progress_.run->plan;
  const PlannedScope& scope = plan.scopes[plan.moments[progress_.moment].scope];
  return ScopeName(scope.kind(), scope.unit);
}

// A scope that is none of the plan's. Until it closes the plan stands still.
void Executor::OpenAgain(OpenScope& scope) {
  const sharding::Plan& plan = progress_.run->plan;
  if (UpdateHasStarted(scope.unit)) {
    errors_.Note(absl::FailedPreconditionError(absl::StrCat(
        ScopeName(scope.kind, scope.unit),
        " after the unit's update of this step has started, so its parameters are the next step's: "
        "open it before its last Backward, or set ebb.asynchronous_step to late")));
    return issuer_->Fence();
  }
  if (plan.decisions.kept_whole[scope.unit]) return issuer_->Fence();
  const bool shown = std::any_of(open_.begin(), open_.end(),
                                 [&](const OpenScope& other) { return other.unit == scope.unit; });
  if (shown || IsGathered(scope.unit)) {
    return issuer_->Fence();
  }
  if (!HasRoom(scope, /*all=*/true)) return;
  scope.displaces = true;
  GatherAlone(scope.unit);
}

void Executor::CloseAgain(const OpenScope& scope) {
  if (scope.displaces) {
    if (kPoisonReleased && device_.kind() == DeviceKind::kCpu) PoisonUnit(scope.unit);
    const sharding::Plan& plan = progress_.run->plan;
    for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
      // What another one displaces still, that one brings back.
      const bool displaced = std::any_of(open_.begin(), open_.end(), [&](const OpenScope& other) {
        return other.displaces && sharding::GathersConflict(plan, unit, other.unit);
      });
      if (!displaced && sharding::GathersConflict(plan, unit, scope.unit) && IsGathered(unit))
        GatherAlone(unit);
    }
  }
  issuer_->Fence();
}

// Whether a gather has brought the unit, or brings it, for a scope that is not over.
bool Executor::IsGathered(int unit) const {
  const sharding::Plan& plan = progress_.run->plan;
  for (int s = 0; s < progress_.order.scopes(); ++s) {
    const int gather = plan.gather_of_scope[s];
    if (plan.scopes[s].unit == unit && gather >= 0 &&
        progress_.fragment->fragment().instruction_of[gather] < issued() &&
        !progress_.order.is_over(s))
      return true;
  }
  return false;
}

// Early ones; those that are carried are the step before's.
bool Executor::UpdateHasStarted(int unit) const {
  for (int index = 0; index < issued(); ++index) {
    const sharding::Instruction& instruction = (*progress_.fragment)[index];
    if (instruction.code == sharding::Code::kUpdate && !instruction.carried &&
        instruction.parts.front().unit == unit)
      return true;
  }
  return false;
}

// Whether no scope that is open shows what lies where the unit goes: any, or those that displace.
bool Executor::HasRoom(const OpenScope& scope, bool all) {
  const auto other = std::find_if(open_.begin(), open_.end(), [&](const OpenScope& open) {
    return (all || open.displaces) &&
           sharding::GathersConflict(progress_.run->plan, scope.unit, open.unit);
  });
  if (other == open_.end()) return true;
  errors_.Note(absl::FailedPreconditionError(absl::StrCat(
      ScopeName(scope.kind, scope.unit), " while ", ScopeName(other->kind, other->unit),
      " is open: the gather pool has room for both only one after the other; close the first, or "
      "raise ebb.prefetch_depth")));
  issuer_->Fence();
  return false;
}

// From where its slices live, between all that was issued and all that comes.
void Executor::GatherAlone(int unit) {
  issuer_->Fence();
  if (plan().decisions.parameter_tier != Tier::kDevice) issuer_->WaitIdle();
  state_->GatherUnit(unit);
  issuer_->Fence();
}

}  // namespace ebb
