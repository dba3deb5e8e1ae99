#include "ebb/runtime/engine/steps/open_scopes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb {

using sharding::Moment;
using sharding::PlannedScope;
using sharding::Role;
using State = sharding::OrderProgress::State;

void OpenScopes::Begin() {
  // The last uses of a walk that ended early are not known.
  if (progress_.evaluation && progress_.moment > 0) core_.order.EndEarly();
  runner_.ReserveSpans();
  progress_.moment = progress_.awaited = 0;
  progress_.is_up_to_date = false;
  views_.Begin(progress_.evaluation, progress_.micro_batches);
  Advance();
}

int64_t OpenScopes::Open(sharding::ScopeKind kind, UnitId unit) {
  callers_core_.Note();
  const int64_t scope = OpenUnit(kind, unit, /*whole=*/0);
  if (scope == 0) return 0;
  for (UnitId part : core_.inputs.model[unit].parts) OpenUnit(kind, part, scope);
  return scope;
}

int64_t OpenScopes::OpenUnit(sharding::ScopeKind kind, UnitId id, int64_t whole) {
  const bool backward = kind == sharding::ScopeKind::kBackward;
  const ModelSpec& model = core_.inputs.model;
  views_.TakeErrors();
  const int unit = static_cast<int>(id);
  if (unit < 0 || unit >= static_cast<int>(model.units.size())) {
    core_.errors.Note(absl::InvalidArgumentError(
        absl::StrCat("unit ", unit, " is not of this engine's model, which has ",
                     model.units.size(), " units")));
    return 0;
  }
  if (backward && progress_.gradients.are_final) {
    core_.errors.Note(absl::FailedPreconditionError(
        absl::StrCat(messages_.ScopeName(kind, unit),
                     " after Step::Reduce, which has made the gradients final")));
    return 0;
  }
  const int code = sharding::ScopeCode(kind, unit);
  progress_.log.entries.push_back(code);
  core_.calls.NoteScope(kind, id);

  OpenScope scope{
      .id = ++last_, .whole = whole, .unit = unit, .kind = kind, .opened_ns = Timeline::NowNs()};
  ranges_.Open(scope.id, kind, unit);
  const int expected = progress_.NextCode();
  const sharding::Match match = progress_.order.Open(kind, unit);
  if (progress_.evaluation && match.kind == sharding::Match::kNextRound) Begin();
  scope.planned = match.scope;
  scope.round = progress_.order.round();
  if (scope.planned >= 0) {
    scope.visit = progress_.PlannedScopeOf(scope.planned).visit;
  } else {
    scope.visit = VisitOf(unit, backward);
  }
  progress_.trail.Open(code, expected, progress_.NextCode());
  notices_.Opened(match, kind, unit);
  progress_.gradients.any |= backward;
  if (match.kind == sharding::Match::kRefused) {
    core_.order.Fence();
  } else if (match.kind == sharding::Match::kAgain) {
    OpenAgain(scope);
  } else {
    Advance();
    if (progress_.awaited <= progress_.OpeningOf(scope.planned)) OpenAheadOfHeld(scope);
  }
  const int64_t now = Timeline::NowNs();
  timeline_.Add(progress_.trace, "wait", model.units[static_cast<size_t>(unit)].name,
                scope.opened_ns, now);
  scope.opened_ns = now;
  progress_.open.push_back(scope);
  return scope.id;
}

// Runs the plan's moments in order as far as the trainer has come. An open scope holds back the
// work after its close. An open scope that is not in the plan holds back all work.
void OpenScopes::Advance() {
  if (std::any_of(progress_.open.begin(), progress_.open.end(),
                  [](const OpenScope& scope) { return scope.planned < 0; }))
    return;
  sharding::OrderProgress& order = progress_.order;
  while (progress_.moment < progress_.moments()) {
    const size_t at = progress_.moment;
    const sharding::Moment& moment = progress_.MomentOf(at);
    if (moment.kind == Moment::kFinish) return;  // Finish's own
    const int scope = moment.kind == Moment::kBegin ? -1 : progress_.ScopeOf(at);
    if (moment.kind == Moment::kOpen && !order.has_come(scope)) return;
    if (moment.kind == Moment::kClose && !order.is_over(scope)) return;
    ++progress_.moment;
    if (moment.kind == Moment::kClose && order.state(scope) == State::kLeftOut) {
      const PlannedScope& planned = progress_.PlannedScopeOf(scope);
      const OpenScope left_out{.planned = scope,
                               .unit = planned.unit,
                               .visit = planned.visit,
                               .round = progress_.RoundOf(at),
                               .kind = planned.kind()};
      if (ReducesAfter(left_out)) views_.CompleteGradient(left_out);
    }
    // The kernels since the moment before.
    const int before = at > 0 ? progress_.MomentOf(at - 1).kernels : -1;
    if (before >= 0) runner_.EndKernels(before);
    runner_.Issue(moment.begin, moment.end);
    if (progress_.awaited <= at) {
      progress_.awaited = at + 1;
      if (moment.kernels >= 0) runner_.StartKernels(moment.kernels);
    }
    if (moment.kind == Moment::kOpen) order.Release(progress_.RoundOf(at));
  }
}

void OpenScopes::Close(int64_t id) {
  if (id == 0) return;  // of a scope that did not open
  std::vector<OpenScope>& open = progress_.open;
  for (size_t i = open.size(); i-- > 0;)
    if (open[i].whole == id) Close(open[i]);
  if (OpenScope* scope = progress_.Find(id)) Close(*scope);
}

void OpenScopes::Close(OpenScope& scope) {
  views_.TakeErrors();  // before this rank's part enters an update
  const OpenScope closing = scope;
  progress_.open.erase(progress_.open.begin() + (&scope - progress_.open.data()));
  timeline_.Add(progress_.trace, sharding::Name(closing.kind),
                core_.inputs.model.units[static_cast<size_t>(closing.unit)].name, closing.opened_ns,
                Timeline::NowNs());
  if (ReducesAfter(closing)) views_.CompleteGradient(closing);
  progress_.order.Close(closing.planned);
  if (closing.planned < 0) {
    CloseAgain(closing);
  } else {
    views_.Poison(closing);
  }
  Advance();
  ranges_.Close(closing.id);
}

void OpenScopes::CloseAll() {
  while (!progress_.open.empty()) Close(progress_.open.back());
}

void OpenScopes::LeaveOutRest() {
  notices_.LeaveOutRest();
  Advance();
}

bool OpenScopes::ReducesAfter(const OpenScope& scope) const {
  return scope.planned >= 0 && progress_.PlannedScopeOf(scope.planned).is_reduced;
}

// The plan's next moment is the close of a scope that is still open, but the trainer opens a later
// one.
void OpenScopes::OpenAheadOfHeld(const OpenScope& scope) {
  if (!HasRoom(scope, /*all=*/false)) return;
  // The kernels of scopes that were left out wait too. Kernels behind them on the compute stream do
  // not repeat those waits.
  const size_t begin = std::max(progress_.moment, progress_.awaited),
               end = progress_.OpeningOf(scope.planned) + 1;
  for (size_t moment = begin; moment < end; ++moment) {
    const sharding::Op* const missing = FindNotIssued(moment);
    if (missing == nullptr) continue;
    const bool gathers = missing->role == Role::kGather ||
                         missing->role == Role::kGatherSecondary ||
                         missing->role == Role::kFillSecondary;
    core_.errors.Note(absl::FailedPreconditionError(
        absl::StrCat(messages_.ScopeName(scope.kind, scope.unit), " while ", HeldScope(),
                     " is open: the plan has the ", std::string(sharding::Name(missing->role)),
                     " that it needs after that scope, so close that scope first",
                     gathers ? ", or raise ebb.prefetch_depth" : "")));
    return core_.order.Fence();
  }
  for (size_t moment = begin; moment < end; ++moment) {
    const int kernels = progress_.MomentOf(moment).kernels;
    if (kernels >= 0) runner_.StartKernels(kernels);
  }
  progress_.awaited = end;
}

// Something that the kernels of a moment wait for and that was not issued yet. Other kernels come
// before them on their stream.
const sharding::Op* OpenScopes::FindNotIssued(size_t moment) const {
  using sharding::Op;
  const int index = progress_.MomentOf(moment).kernels;
  if (index < 0) return nullptr;
  const LinkedList& list = *progress_.list;
  const auto is_kernels = [](const Op& other) { return other.code() == sharding::Code::kKernels; };
  const auto first_of = [&](int begin, int end) -> const Op* {
    for (int other = begin; other < end; ++other)
      if (!is_kernels(list[other])) return &list[other];
    return nullptr;
  };
  const std::vector<int>& round_begins = list.list().round_begins;
  // A round is issued as a whole before the next one, which may be the same again.
  const int round = progress_.RoundOf(progress_.moment), of_moment = progress_.RoundOf(moment);
  const bool is_later_round = !round_begins.empty() && of_moment > round;
  for (const int wait : list.waits(index).on) {
    if ((is_later_round || wait >= runner_.issued()) && !is_kernels(list[wait])) return &list[wait];
  }
  if (!is_later_round) return nullptr;
  const auto planned = static_cast<size_t>(progress_.RoundInPlan(round));
  const int end = planned < round_begins.size() ? round_begins[planned] : list.size();
  if (of_moment > round + 1) {  // skips rounds in the middle, of which nothing is issued
    const Op* const left = first_of(runner_.issued(), end);
    return left != nullptr ? left : first_of(round_begins.front(), round_begins.back());
  }
  for (int other = runner_.issued(); other < end; ++other) {
    if (is_kernels(list[other])) continue;
    for (const sharding::CellUse& use : list.waits(index).enters) {
      for (const sharding::CellUse& last : list.waits(other).leaves)
        if (use.cell == last.cell && (use.writes || last.writes)) return &list[other];
    }
  }
  return nullptr;
}

// For a scope that is not in the order: the unit's last visit; for a backward scope, the last with
// a gradient.
int OpenScopes::VisitOf(int unit, bool backward) const {
  const std::vector<Visit>& visits = core_.inputs.model.forward;
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
  for (const OpenScope& open : progress_.open)
    if (open.planned < 0) return messages_.ScopeName(open.kind, open.unit);
  const PlannedScope& scope = progress_.PlannedScopeOf(progress_.ScopeOf(progress_.moment));
  return messages_.ScopeName(scope.kind(), scope.unit);
}

// Forward scopes outside the declared order.

void OpenScopes::OpenAgain(OpenScope& scope) {
  const sharding::Plan& plan = progress_.plan();
  if (runner_.UpdateHasStarted(scope.unit)) {
    core_.errors.Note(absl::FailedPreconditionError(absl::StrCat(
        messages_.ScopeName(scope.kind, scope.unit),
        " after the unit's update of this step has started, so its parameters are the next step's: "
        "open it before its last Backward, or set ebb.asynchronous_step to late")));
    return core_.order.Fence();
  }
  if (sharding::IsKeptWhole(plan, scope.unit)) return core_.order.Fence();
  // The unit's memory may by now hold another gathered unit.
  if (!HasRoom(scope, /*all=*/false)) return;
  const bool shown = std::any_of(progress_.open.begin(), progress_.open.end(),
                                 [&](const OpenScope& other) { return other.unit == scope.unit; });
  if (shown || IsGathered(scope.unit)) return core_.order.Fence();
  if (!HasRoom(scope, /*all=*/true)) return;
  scope.displaces = true;
  runner_.BringUpToDate();
  GatherAlone(scope.unit);
}

void OpenScopes::CloseAgain(const OpenScope& scope) {
  if (scope.displaces) {
    views_.Poison(scope.unit);
    const sharding::Plan& plan = progress_.plan();
    for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
      // A unit that another scope still displaces is brought back by that scope.
      const bool displaced =
          std::any_of(progress_.open.begin(), progress_.open.end(), [&](const OpenScope& other) {
            return other.displaces && sharding::GathersConflict(plan.table, unit, other.unit);
          });
      if (!displaced && sharding::GathersConflict(plan.table, unit, scope.unit) && IsGathered(unit))
        GatherAlone(unit);
    }
  }
  core_.order.Fence();
}

bool OpenScopes::IsGathered(int unit) const {
  const sharding::Plan& plan = progress_.plan();
  // The planned rounds as if those in the middle that are over had been one.
  const int round = progress_.RoundOf(progress_.moment),
            before = (round - progress_.RoundInPlan(round)) * progress_.scopes_of_round();
  for (int s = 0; s < static_cast<int>(plan.scopes.size()); ++s) {
    const int gather = plan.gather_of_scope[s];
    if (plan.scopes[s].unit == unit && gather >= 0 &&
        progress_.list->list().index_of[gather] < runner_.issued() &&
        !progress_.order.is_over(before + s))
      return true;
  }
  return false;
}

bool OpenScopes::HasRoom(const OpenScope& scope, bool all) {
  const auto other =
      std::find_if(progress_.open.begin(), progress_.open.end(), [&](const OpenScope& open) {
        return (all || open.displaces) &&
               sharding::GathersConflict(progress_.plan().table, scope.unit, open.unit);
      });
  if (other == progress_.open.end()) return true;
  core_.errors.Note(absl::FailedPreconditionError(absl::StrCat(
      messages_.ScopeName(scope.kind, scope.unit), " while ",
      messages_.ScopeName(other->kind, other->unit),
      " is open: the gather pool has room for one of them at a time; close the other scope first, "
      "or raise ebb.prefetch_depth")));
  core_.order.Fence();
  return false;
}

// Between all that was issued and all that comes.
void OpenScopes::GatherAlone(int unit) {
  core_.order.Fence();
  state_.GatherUnit(unit);
  core_.order.Fence();
}

}  // namespace ebb
