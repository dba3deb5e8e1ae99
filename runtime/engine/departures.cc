// What the engine does when the trainer leaves the declared order. Legal, the same on every rank,
// with one warning. Left out: a scope ahead is asked for; those between count as opened and closed
// at once, with zero gradients. Out of order: something behind is asked for; for the rest of the
// step units are gathered when opened and reduced when closed.
// Where boundary activations belong to the engine both are errors, since a chain with a hole has no
// meaning.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/conflicts.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"

namespace ebb {

using sharding::OperationKind;
using sharding::PlannedScope;

int Executor::MatchScope(bool backward, int unit) {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  const int next = progress_.next_scope, count = static_cast<int>(scopes.size());
  const auto matches = [&](int s) {
    return scopes[s].backward == backward && scopes[s].unit == unit;
  };
  if (!progress_.departed) {
    if (next < count && matches(next)) return next;
    // What is left out behind a scope that is still open would be gathered when that closes: over
    // what is shown by then.
    const bool may_leave_out = open_.empty();
    // Head and loss fused into the last visit's backward.
    if (may_leave_out && next + 1 < count && !scopes[next].backward && scopes[next + 1].backward &&
        matches(next + 1)) {
      SkipTo(next + 1);
      return next + 1;
    }
    const int ahead = FindAhead(backward, unit);
    const bool early = progress_.run->plan.decisions.timing == sharding::UpdateTiming::kEarly;
    // An early update would follow the zeros of a skipped backward, which may yet come.
    if (may_leave_out && ahead >= 0 && !(early && backward)) {
      WarnOfDeparture(ScopeName(backward, unit),
                      "what the order has before it is left out of this step");
      SkipTo(ahead);
      return ahead;
    }
    Depart(backward, unit);
  }
  if (!backward && StartsNextRound(unit)) {
    ++progress_.round;
    progress_.recomputed = false;
  }
  for (int s = 0; s < count; ++s) {
    if (scopes[s].round == progress_.round && matches(s) && !progress_.opened[s]) return s;
  }
  progress_.recomputed |= !backward && BackwardHasBegun(progress_.round);
  return -1;
}

// The scope that is meant if those before it are left out: in this round's remaining walk, or the
// next round's start.
int Executor::FindAhead(bool backward, int unit) const {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  const int next = progress_.next_scope, count = static_cast<int>(scopes.size());
  for (int s = next; s < count; ++s) {
    const bool round_starts = s > 0 && scopes[s].round != scopes[s - 1].round;
    if (scopes[s].round != scopes[next].round &&
        !(round_starts && BackwardHasBegun(scopes[next].round) &&
          scopes[s].round == scopes[next].round + 1)) {
      break;
    }
    if (scopes[s].backward == backward && scopes[s].unit == unit) return s;
  }
  return -1;
}

// Rounds follow each other and are of one length: nothing that is asked of one looks at all of them.
int Executor::FirstScopeOf(int round) const {
  const sharding::Plan& plan = progress_.run->plan;
  return static_cast<int>(plan.scopes.size()) / std::max(1, plan.decisions.rounds) * round;
}

bool Executor::BackwardHasBegun(int round) const {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  for (int s = FirstScopeOf(round); s < FirstScopeOf(round + 1); ++s) {
    if (scopes[s].backward && progress_.opened[s] && !progress_.skipped[s]) return true;
  }
  return false;
}

// After the backward of a round has begun, a Forward is the next round's, unless the unit's own
// backward is still to come: then it is recomputed in a scope of its own. For the first unit that
// may be either; those before it tell.
bool Executor::StartsNextRound(int unit) const {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  if (progress_.round + 1 >= progress_.run->plan.decisions.rounds ||
      !BackwardHasBegun(progress_.round))
    return false;
  if (unit == scopes.front().unit && !progress_.recomputed) return true;
  for (int s = FirstScopeOf(progress_.round); s < FirstScopeOf(progress_.round + 1); ++s) {
    if (scopes[s].backward && scopes[s].unit == unit && !progress_.opened[s]) return false;
  }
  return true;
}

// A backward whose round has seen one Forward only, while the round before still lacks it, shows
// that the Forward was not meant to start a round.
void Executor::CheckRound(int planned) {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  const PlannedScope& backward = scopes[planned];
  int forwards = 0;
  bool missing = false;
  for (int s = FirstScopeOf(backward.round - 1); s < FirstScopeOf(backward.round + 1); ++s) {
    const bool opened = progress_.opened[s] && !progress_.skipped[s];
    if (scopes[s].round == backward.round && !scopes[s].backward && opened) ++forwards;
    missing |= scopes[s].round + 1 == backward.round && scopes[s].backward &&
               scopes[s].visit == backward.visit && !opened;
  }
  if (forwards != 1 || !missing) return;
  errors_.Note(absl::FailedPreconditionError(absl::StrCat(
      "the Forward before ", ScopeName(true, backward.unit), " was taken for the start of round ",
      backward.round, "; recompute inside the BackwardScope, which has the parameters too")));
}

void Executor::SkipTo(int planned) {
  for (int s = progress_.next_scope; s < planned; ++s) {
    progress_.opened[s] = progress_.closed[s] = progress_.skipped[s] = 1;
  }
  progress_.next_scope = std::max(progress_.next_scope, planned);
  Advance();
}

void Executor::WarnOfDeparture(std::string_view what_came, std::string_view how) {
  const std::vector<PlannedScope>& scopes = progress_.run->plan.scopes;
  const int next = progress_.next_scope;
  const std::string expected = next < static_cast<int>(scopes.size())
                                   ? ScopeName(scopes[next].backward, scopes[next].unit)
                                   : "the end of the step";
  const std::string what =
      absl::StrCat(std::string(what_came), " where the declared order has ", expected);
  if (OwnsBoundaries()) {
    errors_.Note(absl::FailedPreconditionError(
        absl::StrCat(what,
                     ": boundary activations belong to the engine (Visit::output_bytes), so every "
                     "visit must come in its order")));
  } else if (!warned_of_departure_ && rank_ == 0) {
    LogWarning(absl::StrCat(options_.name, ": ", what, ": ", std::string(how),
                            "; ModelSpec::forward declares the order (said once)"));
  }
  warned_of_departure_ = true;
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

// Leaves the plan for the rest of the step. Gradients that wait for their bucket are reduced on
// their own.
void Executor::Depart(bool backward, int unit) {
  WarnOfDeparture(ScopeName(backward, unit),
                  "units are gathered on demand, without prefetch, until the step ends");
  progress_.departed = true;
  IssueCarriedLeft();
  AwaitOffloads();
  const sharding::Plan& plan = progress_.run->plan;
  for (size_t s = 0; s < plan.scopes.size(); ++s) {
    const int reduce = plan.reduce_of_scope[s];
    if (reduce < 0 || !progress_.closed[s] || reduced_scopes_[s]) continue;
    ReduceNow(plan.scopes[s].unit, plan.scopes[s].visit);
    reduced_scopes_[s] = 1;
  }
}

void Executor::OpenDeparted(const OpenScope& scope) {
  const sharding::Plan& plan = progress_.run->plan;
  if (scope.planned >= 0) progress_.awaited[scope.planned] = 1;
  if (plan.decisions.kept_whole[scope.unit]) {
    compute_.Wait(updated_[scope.unit]);
  } else {
    const bool gathered = std::any_of(open_.begin(), open_.end(), [&](const OpenScope& other) {
      return other.unit == scope.unit;
    });
    if (!gathered && SlotIsFree(scope, scope.unit)) GatherOnDemand(scope.unit);
  }
  if (!scope.backward || !plan.decisions.trainable[scope.unit]) return;
  for (size_t index = 0; index < plan.operations.size(); ++index) {
    const sharding::Operation& operation = plan.operations[index];
    // Carried ones are the step before's.
    if (operation.kind == OperationKind::kUpdate && operation.parts.front().unit == scope.unit &&
        operation.condition != sharding::Condition::kCarrying && progress_.run->issued[index]) {
      errors_.Note(absl::FailedPreconditionError(
          absl::StrCat(ScopeName(true, scope.unit),
                       " after its update of this step had started; declare every visit, or set "
                       "ebb.asynchronous_step to late")));
    }
  }
  if (!GradientIsFree(scope)) return;
  if (GradientIsShard(scope.unit)) {
    compute_.Wait(updated_[scope.unit]);
    if (contributions_[scope.unit] > 0) {
      const absl::Status kept =
          displaced_gradients_.Keep(scope.unit, storage_->GradientSlice(scope.unit),
                                    GradientShardBytes(scope.unit), *reduce_, device_, ledger_);
      if (!kept.ok()) errors_.Note(kept);
    }
  }
  reduce_->Record(*fence_);
  compute_.Wait(*fence_);
}

// The plan's next moments wait for a scope that is still open, but the trainer opens the one after
// it.
void Executor::OpenBlocked(const OpenScope& scope) {
  const sharding::Plan& plan = progress_.run->plan;
  progress_.awaited[scope.planned] = 1;
  const int gather = plan.gather_of_scope[scope.planned];
  if (gather >= 0 && !progress_.run->issued[gather]) {
    for (const sharding::Part& part : plan.operations[gather].parts) {
      if (!SlotIsFree(scope, part.unit)) return;
    }
    const Runnable& run = *progress_.run;
    std::vector<int>& needs = progress_.needs;
    sharding::FindNeeds(plan, run.issued, run.carried, gather, needs);
    if (sharding::TakesHeldSlot(plan, run.issued, needs)) {
      return errors_.Note(absl::FailedPreconditionError(
          absl::StrCat(ScopeName(scope.backward, scope.unit),
                       " while a scope before it is open, whose update has host memory that its "
                       "parameters are read to: close that scope first, or set "
                       "ebb.asynchronous_step to late")));
    }
    compute_.Record(*fence_);
    gather_->Wait(*fence_);
    if (upload_) upload_->Wait(*fence_);
    for (int operation : needs) Issue(operation);
  }
  if (scope.backward && plan.decisions.trainable[scope.unit] && !GradientIsFree(scope)) return;
  const std::span<const sharding::Dependency> waits =
      plan.moments[static_cast<size_t>(sharding::OpenTick(scope.planned))].compute;
  if (const int held = sharding::NotIssued(plan, progress_.run->issued, waits); held >= 0) {
    return errors_.Note(absl::FailedPreconditionError(
        absl::StrCat(ScopeName(scope.backward, scope.unit),
                     " while a scope before it is open, behind which the ",
                     std::string(sharding::Name(plan.operations[held].kind)),
                     " of what it needs comes: close that scope first")));
  }
  WaitCompute(waits);
}

bool Executor::SlotIsFree(const OpenScope& scope, int unit) {
  const auto other = std::find_if(open_.begin(), open_.end(), [&](const OpenScope& open) {
    return sharding::GathersConflict(progress_.run->plan, unit, open.unit);
  });
  if (other == open_.end()) return true;
  errors_.Note(absl::FailedPreconditionError(absl::StrCat(
      ScopeName(scope.backward, scope.unit), " while ", ScopeName(other->backward, other->unit),
      " is open: the gather pool has room for both only one after the other; close the first, or "
      "raise ebb.prefetch_depth")));
  return false;
}

bool Executor::GradientIsFree(const OpenScope& scope) {
  const sharding::Plan& plan = progress_.run->plan;
  const auto planned = [](const OpenScope& open) {
    return PlannedScope{.visit = open.visit, .unit = open.unit};
  };
  int unit = -1;
  const auto other = std::find_if(open_.begin(), open_.end(), [&](const OpenScope& open) {
    return open.backward && sharding::GradientsConflict(plan, planned(scope), planned(open));
  });
  if (other != open_.end()) {
    unit = other->unit;
  } else if (!progress_.departed) {
    const int s = sharding::UnreducedInTheWay(plan, progress_.run->issued, scope.planned);
    if (s >= 0) unit = plan.scopes[s].unit;
  }
  if (unit < 0) return true;
  errors_.Note(absl::FailedPreconditionError(absl::StrCat(
      ScopeName(true, scope.unit), " before the gradient of ", ScopeName(true, unit),
      " has left the memory they share: close that scope, and those before it, first")));
  return false;
}

void Executor::GatherOnDemand(int unit) {
  compute_.Record(*demand_);
  gather_->Wait(*demand_);
  gather_->Wait(updated_[unit]);
  if (plan().decisions.parameter_tier != Tier::kDevice) {
    // A gather that was on its way may lie where this slice goes.
    gather_->Record(*demand_);
    upload_->Wait(*demand_);
    AwaitState(unit);
    FetchSlice(unit);
  }
  NoteCollective(*gather_communicator_,
                 gather_communicator_->AllGather(*gather_, single_gather_[unit], config_.compute));
  Compute(*gather_, [this, unit] { NoteIfBroken(OperationKind::kGather, {.unit = unit}); });
  gather_->Record(*demand_);
  compute_.Wait(*demand_);
}

void Executor::ReduceNow(int unit, int visit) {
  const sharding::Decisions& decisions = progress_.run->plan.decisions;
  compute_.Record(*demand_);
  reduce_->Wait(*demand_);
  reduce_->Wait(updated_[unit]);
  std::byte* source = storage_->Gradient(visit);
  if (decisions.casts()) {
    source = storage_->Staging(plan().pools.staging_cast);
    Compute(*reduce_, [this, unit, visit, source] { Cast(unit, visit, source); });
  }
  const float divide = static_cast<float>(1.0 / progress_.divisor);
  const bool replicas = decisions.replicas() > 1;
  NoteCollective(*reduce_communicator_,
                 reduce_communicator_->ReduceScatter(*reduce_, single_reduce_[visit],
                                                     decisions.reduced(), replicas ? 1 : divide));
  Compute(*reduce_, [this, unit] { NoteIfBroken(OperationKind::kReduce, {.unit = unit}); });
  if (replicas) {
    NoteCollective(*replicas_communicator_,
                   replicas_communicator_->AllReduce(*reduce_, single_all_reduce_[visit],
                                                     decisions.reduced(), ReduceOp::kSum, divide));
    Compute(*reduce_, [this, unit] { NoteIfBroken(OperationKind::kAllReduce, {.unit = unit}); });
  }
  std::byte* reduced = source + SliceOffset(unit, decisions.reduced());
  if (decisions.rounds_slices()) {
    const std::byte* const summed =
        std::exchange(reduced, storage_->Staging(plan().pools.staging_rounded));
    Compute(*reduce_, [this, unit, summed, reduced] { Round(unit, summed, reduced); });
  }
  const bool first = contributions_[unit]++ == 0;
  squares_stale_[unit] = 1;
  if (GradientIsShard(unit)) return AddDisplacedGradient(unit);
  Compute(*reduce_, [this, unit, reduced, first] {
    Stream& stream = SettledStream(unit);
    const int64_t bytes =
        plan().layout.units[unit].trainable.shard * SizeOf(plan().decisions.communication);
    const bool reached = &stream == &*reduce_;
    const absl::Status summed = VisitMemory(
        reduced, reached ? Tier::kCpu : Tier::kDevice, bytes, Access::kRead, [&](std::byte* slice) {
          return VisitGradient(unit, Access::kReadWrite, [&](std::byte* shard) {
            Accumulate(stream, unit, slice, shard, first, /*last=*/false);
          });
        });
    if (!summed.ok()) errors_.Fail(summed);
  });
}

bool Executor::GradientIsShard(int unit) const {
  return sharding::GradientIsShard(plan().decisions, plan().pools.homes, unit);
}

int64_t Executor::GradientShardBytes(int unit) const {
  return plan().layout.units[static_cast<size_t>(unit)].trainable.shard *
         SizeOf(plan().decisions.shard_dtype(unit));
}

// To what was there before backward wrote over it: nothing but for a second backward.
void Executor::AddDisplacedGradient(int unit) {
  std::byte* const sum = displaced_gradients_.Take(unit);
  if (sum == nullptr) return;
  std::byte* const shard = storage_->GradientSlice(unit);
  Compute(*reduce_, [this, unit, shard, sum] {
    Accumulate(*reduce_, unit, shard, sum, /*first=*/false, /*last=*/false);
  });
  reduce_->Copy(shard, sum, GradientShardBytes(unit));
}

// Reductions of what was left out, with zeros, in the plan's order; then what the plan has after
// complete gradients.
void Executor::FlushDeparted() {
  const sharding::Plan& plan = progress_.run->plan;
  for (size_t s = 0; s < plan.scopes.size(); ++s) {
    if (plan.reduce_of_scope[s] < 0 || reduced_scopes_[s]) continue;
    const PlannedScope& planned = plan.scopes[s];
    reduce_->Record(*fence_);
    compute_.Wait(*fence_);
    compute_.Wait(updated_[planned.unit]);  // which reads what is the gradient's own shard
    CompleteGradient({.planned = static_cast<int>(s),
                      .unit = planned.unit,
                      .visit = planned.visit,
                      .round = planned.round,
                      .backward = true});
    ReduceNow(planned.unit, planned.visit);
    reduced_scopes_[s] = 1;
  }
  for (size_t index = 0; index < plan.operations.size(); ++index) {
    const sharding::Operation& operation = plan.operations[index];
    if (operation.kind != OperationKind::kGatherGradient) continue;
    // What was made whole before the departure added to it is not whole any more.
    if (std::any_of(operation.parts.begin(), operation.parts.end(),
                    [&](const sharding::Part& part) { return squares_stale_[part.unit] != 0; }))
      progress_.run->issued[index] = 0;
    Issue(static_cast<int>(index));
  }
}

// Early updates whose moment the departure passed over.
void Executor::IssueUpdatesLeft() {
  const sharding::Plan& plan = progress_.run->plan;
  if (plan.decisions.timing != sharding::UpdateTiming::kEarly) return;
  reduce_->Record(*fence_);
  gather_->Record(*demand_);
  for (std::optional<Stream>* stream :
       {&update_, &host_update_, &upload_, &download_, &read_states_}) {
    if (!stream->has_value()) continue;
    (*stream)->Wait(*fence_);
    (*stream)->Wait(*demand_);
  }
  for (size_t index = 0; index < plan.operations.size(); ++index) {
    if (plan.operations[index].of_update) Issue(static_cast<int>(index));
  }
}

}  // namespace ebb
