#include "ebb/runtime/engine/steps/open_scopes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/pools/pools.h"

namespace ebb {

using sharding::Moment;
using sharding::OperationKind;
using sharding::PlannedScope;
using State = sharding::OrderProgress::State;

void OpenScopes::Begin() {
  StepProgress& progress = *with_.progress;
  // The last uses of a walk that ended early are not known.
  if (progress.evaluation && progress.moment > 0) with_.order->EndEarly();
  with_.runner->ReserveSpans();
  progress.moment = progress.awaited = 0;
  progress.is_up_to_date = false;
  with_.views->Begin(progress.evaluation, progress.micro_batches);
  Advance();
}

int64_t OpenScopes::Open(sharding::ScopeKind kind, UnitId unit) {
  with_.core->Note();
  const int64_t scope = OpenUnit(kind, unit, /*whole=*/0);
  if (scope == 0) return 0;
  for (UnitId part : with_.inputs->model[unit].parts) OpenUnit(kind, part, scope);
  return scope;
}

int64_t OpenScopes::OpenUnit(sharding::ScopeKind kind, UnitId id, int64_t whole) {
  const bool backward = kind == sharding::ScopeKind::kBackward;
  StepProgress& progress = *with_.progress;
  const ModelSpec& model = with_.inputs->model;
  with_.views->TakeErrors();
  const int unit = static_cast<int>(id);
  if (unit < 0 || unit >= static_cast<int>(model.units.size())) {
    with_.errors->Note(absl::InvalidArgumentError(
        absl::StrCat("unit ", unit, " is not of this engine's model, which has ",
                     model.units.size(), " units")));
    return 0;
  }
  if (backward && progress.gradients.are_final) {
    with_.errors->Note(absl::FailedPreconditionError(
        absl::StrCat(with_.messages->ScopeName(kind, unit),
                     " after Step::Reduce, which has made the gradients final")));
    return 0;
  }
  const int code = sharding::ScopeCode(kind, unit);
  progress.log.entries.push_back(code);
  with_.calls->NoteScope(kind, id);

  OpenScope scope{
      .id = ++last_, .whole = whole, .unit = unit, .kind = kind, .opened_ns = Timeline::NowNs()};
  with_.ranges->Open(scope.id, kind, unit);
  const int expected = progress.NextCode();
  const sharding::Match match = progress.order.Open(kind, unit);
  if (progress.evaluation && match.kind == sharding::Match::kNextRound) Begin();
  scope.planned = match.scope;
  scope.round = progress.order.round();
  if (scope.planned >= 0) {
    scope.visit = progress.PlannedScopeOf(scope.planned).visit;
  } else {
    scope.visit = VisitOf(unit, backward);
  }
  progress.trail.Open(code, expected, progress.NextCode());
  with_.notices->Opened(match, kind, unit);
  progress.gradients.any |= backward;
  if (match.kind == sharding::Match::kRefused) {
    with_.order->Fence();
  } else if (match.kind == sharding::Match::kAgain) {
    OpenAgain(scope);
  } else {
    Advance();
    if (progress.awaited <= progress.OpeningOf(scope.planned)) OpenAheadOfHeld(scope);
  }
  const int64_t now = Timeline::NowNs();
  with_.timeline->Add(progress.trace, "wait", model.units[static_cast<size_t>(unit)].name,
                      scope.opened_ns, now);
  scope.opened_ns = now;
  progress.open.push_back(scope);
  return scope.id;
}

// Runs the plan's moments in order as far as the trainer has come. An open scope holds back the
// work after its close. An open scope that is not in the plan holds back all work.
void OpenScopes::Advance() {
  StepProgress& progress = *with_.progress;
  if (std::any_of(progress.open.begin(), progress.open.end(),
                  [](const OpenScope& scope) { return scope.planned < 0; }))
    return;
  sharding::OrderProgress& order = progress.order;
  while (progress.moment < progress.moments()) {
    const size_t at = progress.moment;
    const sharding::FragmentMoment& moment = progress.MomentOf(at);
    if (moment.kind == Moment::kFinish) return;  // Finish's own
    const int scope = moment.kind == Moment::kBegin ? -1 : progress.ScopeOf(at);
    if (moment.kind == Moment::kOpen && !order.has_come(scope)) return;
    if (moment.kind == Moment::kClose && !order.is_over(scope)) return;
    ++progress.moment;
    if (moment.kind == Moment::kClose && order.state(scope) == State::kLeftOut) {
      const PlannedScope& planned = progress.PlannedScopeOf(scope);
      const OpenScope left_out{.planned = scope,
                               .unit = planned.unit,
                               .visit = planned.visit,
                               .round = progress.RoundOf(at),
                               .kind = planned.kind()};
      if (ReducesAfter(left_out)) with_.views->CompleteGradient(left_out);
    }
    // The kernels since the moment before.
    const int before = at > 0 ? progress.MomentOf(at - 1).kernels : -1;
    if (before >= 0) with_.runner->EndKernels(before);
    with_.runner->Issue(moment.begin, moment.end);
    if (progress.awaited <= at) {
      progress.awaited = at + 1;
      if (moment.kernels >= 0) with_.runner->StartKernels(moment.kernels);
    }
    if (moment.kind == Moment::kOpen) order.Release(progress.RoundOf(at));
  }
}

void OpenScopes::Close(int64_t id) {
  if (id == 0) return;  // of a scope that did not open
  std::vector<OpenScope>& open = with_.progress->open;
  for (size_t i = open.size(); i-- > 0;)
    if (open[i].whole == id) Close(open[i]);
  if (OpenScope* scope = with_.progress->Find(id)) Close(*scope);
}

void OpenScopes::Close(OpenScope& scope) {
  StepProgress& progress = *with_.progress;
  with_.views->TakeErrors();  // before this rank's part enters an update
  const OpenScope closing = scope;
  progress.open.erase(progress.open.begin() + (&scope - progress.open.data()));
  with_.timeline->Add(progress.trace, sharding::Name(closing.kind),
                      with_.inputs->model.units[static_cast<size_t>(closing.unit)].name,
                      closing.opened_ns, Timeline::NowNs());
  if (ReducesAfter(closing)) with_.views->CompleteGradient(closing);
  progress.order.Close(closing.planned);
  if (closing.planned < 0) {
    CloseAgain(closing);
  } else {
    with_.views->Poison(closing);
  }
  Advance();
  with_.ranges->Close(closing.id);
}

void OpenScopes::CloseAll() {
  while (!with_.progress->open.empty()) Close(with_.progress->open.back());
}

void OpenScopes::LeaveOutRest() {
  with_.notices->LeaveOutRest();
  Advance();
}

bool OpenScopes::ReducesAfter(const OpenScope& scope) const {
  return scope.planned >= 0 && with_.progress->PlannedScopeOf(scope.planned).is_reduced;
}

// The plan's next moment is the close of a scope that is still open, but the trainer opens a later
// one.
void OpenScopes::OpenAheadOfHeld(const OpenScope& scope) {
  if (!HasRoom(scope, /*all=*/false)) return;
  StepProgress& progress = *with_.progress;
  // The kernels of scopes that were left out wait too. Kernels behind them on the compute stream do
  // not repeat those waits.
  const size_t begin = std::max(progress.moment, progress.awaited),
               end = progress.OpeningOf(scope.planned) + 1;
  for (size_t moment = begin; moment < end; ++moment) {
    const sharding::Instruction* const missing = FindNotIssued(moment);
    if (missing == nullptr) continue;
    const bool gathers = missing->role == OperationKind::kGather ||
                         missing->role == OperationKind::kGatherSecondary ||
                         missing->role == OperationKind::kFillSecondary;
    with_.errors->Note(absl::FailedPreconditionError(
        absl::StrCat(with_.messages->ScopeName(scope.kind, scope.unit), " while ", HeldScope(),
                     " is open: the plan has the ", std::string(sharding::Name(missing->role)),
                     " that it needs after that scope, so close that scope first",
                     gathers ? ", or raise ebb.prefetch_depth" : "")));
    return with_.order->Fence();
  }
  for (size_t moment = begin; moment < end; ++moment) {
    const int kernels = progress.MomentOf(moment).kernels;
    if (kernels >= 0) with_.runner->StartKernels(kernels);
  }
  progress.awaited = end;
}

// Something that the kernels of a moment wait for and that was not issued yet. Other kernels come
// before them on their stream.
const sharding::Instruction* OpenScopes::FindNotIssued(size_t moment) const {
  using sharding::Instruction;
  const StepProgress& progress = *with_.progress;
  const int index = progress.MomentOf(moment).kernels;
  if (index < 0) return nullptr;
  const LinkedFragment& fragment = *progress.fragment;
  const Instruction& kernels = fragment[index];
  const auto is_kernels = [](const Instruction& other) {
    return other.code == sharding::Code::kKernels;
  };
  const auto first_of = [&](int begin, int end) -> const Instruction* {
    for (int other = begin; other < end; ++other)
      if (!is_kernels(fragment[other])) return &fragment[other];
    return nullptr;
  };
  const std::vector<int>& round_begins = fragment.fragment().round_begins;
  // A round is issued as a whole before the next one, which may be the same again.
  const int round = progress.RoundOf(progress.moment), of_moment = progress.RoundOf(moment);
  const bool is_later_round = !round_begins.empty() && of_moment > round;
  for (const int wait : kernels.waits) {
    if ((is_later_round || wait >= with_.runner->issued()) && !is_kernels(fragment[wait]))
      return &fragment[wait];
  }
  if (!is_later_round) return nullptr;
  const auto planned = static_cast<size_t>(progress.RoundInPlan(round));
  const int end = planned < round_begins.size() ? round_begins[planned] : fragment.size();
  if (of_moment > round + 1) {  // skips rounds in the middle, of which nothing is issued
    const Instruction* const left = first_of(with_.runner->issued(), end);
    return left != nullptr ? left : first_of(round_begins.front(), round_begins.back());
  }
  for (int other = with_.runner->issued(); other < end; ++other) {
    if (is_kernels(fragment[other])) continue;
    for (const sharding::CellUse& use : kernels.enters) {
      for (const sharding::CellUse& last : fragment[other].leaves)
        if (use.cell == last.cell && (use.writes || last.writes)) return &fragment[other];
    }
  }
  return nullptr;
}

// For a scope that is not in the order: the unit's last visit; for a backward scope, the last with
// a gradient.
int OpenScopes::VisitOf(int unit, bool backward) const {
  const std::vector<Visit>& visits = with_.inputs->model.forward;
  int found = 0;
  bool has_gradient = false;
  for (size_t v = 0; v < visits.size(); ++v) {
    if (static_cast<int>(visits[v].unit) != unit) continue;
    const bool takes = visits[v].backward && visits[v].gradients;
    if (backward && has_gradient && !takes) continue;
    has_gradient = takes;
    found = static_cast<int>(v);
  }
  return found;
}

// The scope that holds the plan back.
std::string OpenScopes::HeldScope() const {
  const StepProgress& progress = *with_.progress;
  for (const OpenScope& open : progress.open)
    if (open.planned < 0) return with_.messages->ScopeName(open.kind, open.unit);
  const PlannedScope& scope = progress.PlannedScopeOf(progress.ScopeOf(progress.moment));
  return with_.messages->ScopeName(scope.kind(), scope.unit);
}

// Forward scopes outside the declared order.

void OpenScopes::OpenAgain(OpenScope& scope) {
  const sharding::Plan& plan = with_.progress->plan();
  if (with_.runner->UpdateHasStarted(scope.unit)) {
    with_.errors->Note(absl::FailedPreconditionError(absl::StrCat(
        with_.messages->ScopeName(scope.kind, scope.unit),
        " after the unit's update of this step has started, so its parameters are the next step's: "
        "open it before its last Backward, or set ebb.asynchronous_step to late")));
    return with_.order->Fence();
  }
  if (sharding::IsKeptWhole(plan, scope.unit)) return with_.order->Fence();
  // The unit's memory may by now hold another gathered unit.
  if (!HasRoom(scope, /*all=*/false)) return;
  const bool shown = std::any_of(with_.progress->open.begin(), with_.progress->open.end(),
                                 [&](const OpenScope& other) { return other.unit == scope.unit; });
  if (shown || IsGathered(scope.unit)) return with_.order->Fence();
  if (!HasRoom(scope, /*all=*/true)) return;
  scope.displaces = true;
  with_.runner->BringUpToDate();
  GatherAlone(scope.unit);
}

void OpenScopes::CloseAgain(const OpenScope& scope) {
  if (scope.displaces) {
    with_.views->Poison(scope.unit);
    const sharding::Plan& plan = with_.progress->plan();
    for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
      // A unit that another scope still displaces is brought back by that scope.
      const bool displaced = std::any_of(
          with_.progress->open.begin(), with_.progress->open.end(), [&](const OpenScope& other) {
            return other.displaces && sharding::GathersConflict(plan, unit, other.unit);
          });
      if (!displaced && sharding::GathersConflict(plan, unit, scope.unit) && IsGathered(unit))
        GatherAlone(unit);
    }
  }
  with_.order->Fence();
}

bool OpenScopes::IsGathered(int unit) const {
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

bool OpenScopes::HasRoom(const OpenScope& scope, bool all) {
  const auto other = std::find_if(
      with_.progress->open.begin(), with_.progress->open.end(), [&](const OpenScope& open) {
        return (all || open.displaces) &&
               sharding::GathersConflict(with_.progress->plan(), scope.unit, open.unit);
      });
  if (other == with_.progress->open.end()) return true;
  with_.errors->Note(absl::FailedPreconditionError(absl::StrCat(
      with_.messages->ScopeName(scope.kind, scope.unit), " while ",
      with_.messages->ScopeName(other->kind, other->unit),
      " is open: the gather pool has room for one of them at a time; close the other scope first, "
      "or raise ebb.prefetch_depth")));
  with_.order->Fence();
  return false;
}

// Between all that was issued and all that comes.
void OpenScopes::GatherAlone(int unit) {
  with_.order->Fence();
  with_.state->GatherUnit(unit);
  with_.order->Fence();
}

}  // namespace ebb
