// Turns a trainer's scopes into the moments of a plan, in the same way on every rank. A trainer may
// leave the declared order (sharding/order.h says the meaning of each opening):
//
//   left out        its moments run as planned, so that ranks' collectives stay paired; no gradient
//   ahead of one    it opens if all that its kernels wait for was issued, because operations are
//   held open       issued in the plan's order only
//   again           the unit is gathered alone, over what its memory holds, and the plan pauses; at
//                   its close displaced units that are still in use are gathered again
//
// If boundary activations belong to the engine, all but the second are errors.
#pragma once

#include <cstdint>
#include <string>

#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/profiler_ranges.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/steps/list_runner.h"
#include "ebb/runtime/engine/steps/order_notices.h"
#include "ebb/runtime/engine/steps/scope_views.h"
#include "ebb/runtime/engine/steps/step_progress.h"

namespace ebb {

class OpenScopes {
 public:
  OpenScopes(const Core& core, StepProgress& progress, ListRunner& runner, StateAccess& state,
             OrderNotices& notices, ScopeViews& views, const OutcomeMessages& messages,
             ProfilerRanges& ranges, StepTimeline& timeline, CallersCore& callers_core)
      : core_(core),
        progress_(progress),
        runner_(runner),
        state_(state),
        notices_(notices),
        views_(views),
        messages_(messages),
        ranges_(ranges),
        timeline_(timeline),
        callers_core_(callers_core) {}

  // Begins at the plan's first moment: a step, an evaluation, and each of its walks.
  void Begin();
  // For the open step or evaluation. Returns the number of this opening; 0: there is no such scope,
  // and the step has an error.
  int64_t Open(sharding::ScopeKind kind, UnitId unit);
  void Close(int64_t scope);
  // Closes or leaves out the rest of the trainer's scopes: the step is complete.
  void CloseAll();
  void LeaveOutRest();
  ScopeViews& views() const { return views_; }
  int64_t last() const { return last_; }  // the number of the newest opening, of all steps

 private:
  // `whole`: as OpenScope has it.
  int64_t OpenUnit(sharding::ScopeKind kind, UnitId unit, int64_t whole);
  void Close(OpenScope& scope);
  void Advance();
  void OpenAheadOfHeld(const OpenScope& scope);
  const sharding::Op* FindNotIssued(size_t moment) const;
  std::string HeldScope() const;
  bool ReducesAfter(const OpenScope& scope) const;
  int VisitOf(int unit, bool backward) const;
  void OpenAgain(OpenScope& scope);
  void CloseAgain(const OpenScope& scope);
  // Whether a gather has brought the unit, or brings it, for a scope that is not over.
  bool IsGathered(int unit) const;
  // Whether no open scope (`all`), or no displacing one, shows the unit's memory; else an error.
  bool HasRoom(const OpenScope& scope, bool all);
  void GatherAlone(int unit);

  const Core& core_;
  StepProgress& progress_;
  ListRunner& runner_;
  StateAccess& state_;
  OrderNotices& notices_;
  ScopeViews& views_;
  const OutcomeMessages& messages_;
  ProfilerRanges& ranges_;
  StepTimeline& timeline_;
  CallersCore& callers_core_;
  int64_t last_ = 0;
};

}  // namespace ebb
