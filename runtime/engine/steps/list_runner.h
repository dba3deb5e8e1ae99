// Issues the list that runs as far as its step has come, and the updates that one step leaves
// to the next. Counts the bytes that a step moves.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/moved_bytes.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/steps/step_progress.h"

namespace ebb {

class Issuer;

class ListRunner {
 public:
  ListRunner(const Core& core, StepProgress& progress, Issuer& issuer, StepOutcome& outcome,
             StepTimeline& timeline)
      : core_(core), progress_(progress), issuer_(issuer), outcome_(outcome), timeline_(timeline) {}

  // The step that is open runs this one, with the updates that the step before has left. Counts
  // anew.
  void Choose(Runnable& run);
  void ChooseWalk();
  // Reserves spans of the timeline for the operations of this progress.
  void ReserveSpans() const;

  void Issue(int begin, int end);  // operations of the list that runs
  // The operations issued so far, in their order, as if all finished middle rounds had been one.
  int issued() const;
  // An early update of the unit. A carried update belongs to the step before.
  bool UpdateHasStarted(int unit) const;
  void StartKernels(int op);
  void EndKernels(int op);
  // The trainer's kernels have exchanged these bytes with other tensor ranks.
  void CountOfKernels(int64_t bytes);

  // Updates of the last step are still to be done: until this step has finished, or was drained.
  bool carries() const { return carries_; }
  void set_carries(bool carries) { carries_ = carries; }
  // Runs them, for the call that looks first.
  void Drain();
  // Calls `then` once the carried updates have been issued, by the next step or by whatever looks
  // at the state first: now, if there are none.
  void AfterCarried(std::function<void()> then);
  bool has_after_carried() const { return after_carried_ != nullptr; }
  // Issues the carried updates that are left, because the step is dropped.
  void IssueCarriedLeft();
  // Issues carried updates before an evaluation. The step goes on in the list without them.
  void FinishCarried();
  // Issues carried updates that are left before a unit is gathered out of order. Data that they
  // overwrite comes again on all ranks: some may have done theirs before (Engine::ReadAsync).
  void BringUpToDate();
  // State is not to be looked at between the updates that a step carries.
  absl::Status MayLook() const;
  // Until all state is where it belongs, and nothing reads it there.
  void AwaitState();
  // Brings the data for the rest of the step again, after an evaluation has used its memory.
  void BringAgain();

  // A step has finished, and counts.
  void NoteFinished() { has_finished_ = true; }
  // About the step that finished last, even if its plan is gone. Both count issued work, so they
  // wait for nothing.
  std::vector<CommunicationRow> communication() const;
  std::vector<TrafficRow> traffic() const;

 private:
  StepTag Tag() const;
  void IssueBehindFences(const std::vector<int>& ops);
  void CallAfterCarried();

  const Core& core_;
  StepProgress& progress_;
  Issuer& issuer_;
  StepOutcome& outcome_;
  StepTimeline& timeline_;
  bool carries_ = false;
  std::function<void()> after_carried_;  // null: nothing waits
  std::atomic<bool> has_finished_ = false;
  MovedBytes moved_[2];  // by parity
};

}  // namespace ebb
