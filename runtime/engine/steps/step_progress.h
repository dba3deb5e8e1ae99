// How far the live step or evaluation has come, and which scopes are open. Moments and scopes are
// counted over all rounds of the step. The plan has the moments and scopes of at most three rounds:
//
//   round of the step   0 1 2 3 4 5
//   of the plan         0 1 1 1 1 2
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/engine/issue/runnable.h"
#include "ebb/runtime/engine/issue/step_tag.h"
#include "ebb/runtime/engine/outcome/scope_trail.h"
#include "ebb/runtime/engine/step.h"
#include "ebb/sharding/order.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb {

// Which declared backwards a step left out. Such backwards come no more: their gradient is zero, or
// lacks a part. ebb.strict makes that an error of the step.
class MissingBackwards {
 public:
  // Begins a step of this plan with this many rounds. The plan outlives the step.
  void Begin(const sharding::Plan& plan, int rounds);
  // Scopes [begin, end) of the step are left out. Calls come in the order of the scopes.
  void LeftOut(int begin, int end);
  // Names the first missing backward; OK if there is none.
  absl::Status Error() const;

 private:
  const sharding::Plan* plan_ = nullptr;
  int rounds_ = 1;
  // The first missing backward: its round from 0; unit -1: the whole round. Below: how often the
  // unit's backward was left out by then, and how often it was due.
  bool found_ = false;
  int round_ = 0, unit_ = -1, left_out_ = 0, declared_ = 0;
};

struct OpenScope {
  int64_t id = 0;
  int64_t whole = 0;       // of a unit's part (UnitSpec::parts): the unit's scope; else 0
  int planned = -1;        // scope of the plan; -1: outside the plan, because it is opened again
  bool displaces = false;  // gathered over the memory of planned units
  int unit = 0, visit = 0, round = 0;
  sharding::ScopeKind kind{};
  int64_t opened_ns = 0;
};

// Facts about a step's gradients.
struct StepGradients {
  double divisor = 1, scale = 1;
  bool any = false;        // a backward has come
  bool are_final = false;  // by Step::Reduce
};

// Reset in place, so that a step allocates nothing.
struct StepProgress {
  bool alive = false, evaluation = false;
  int64_t number = 0;
  TraceLabel trace;
  int parity = 0;  // not that of the last finished step: its updates may still run
  StepOptions options;
  int micro_batches = 0;
  StepGradients gradients;
  int rounds = 1;
  Runnable* run = nullptr;
  LinkedList* list = nullptr;  // of the running plan
  size_t moment = 0;           // the next
  sharding::OrderProgress order;
  size_t awaited = 0;          // moments, from the first on, with kernels that wait for their needs
  bool is_up_to_date = false;  // by ListRunner::BringUpToDate
  Evaluation::Sums sums = {};  // the counts; values come from the device. The loss is the first
  CallLog log;
  MissingBackwards backwards;  // of a step
  ScopeTrail trail;            // the same for the ranks' records; of a step
  std::vector<OpenScope> open;

  // The declared order's plan and moments.
  const sharding::Plan& plan() const { return run->plan; }
  size_t moments() const { return moments_of_round() * static_cast<size_t>(rounds) + 2; }
  size_t MomentInPlan(size_t at) const;
  // The round of a moment; the begin is in the first round, the end in the last.
  int RoundOf(size_t at) const;
  const sharding::Moment& MomentOf(size_t at) const {
    return list->list().moments[MomentInPlan(at)];
  }
  int ScopeOf(size_t at) const;       // the step's scope that it opens or closes
  size_t OpeningOf(int scope) const;  // the moment
  int ScopeInPlan(int scope) const;   // index into the plan's
  const sharding::PlannedScope& PlannedScopeOf(int scope) const {
    return plan().scopes[static_cast<size_t>(ScopeInPlan(scope))];
  }
  int scopes_of_round() const {
    return static_cast<int>(plan().scopes.size()) / sharding::PlannedRounds(plan());
  }
  int RoundInPlan(int round) const;
  OpenScope* Find(int64_t scope);
  // The declared next scope, as a log has it.
  int NextCode() const;
  // Values that must be the same on every rank when a step or evaluation begins. Their hash is
  // exchanged.
  void LogBegun();

 private:
  size_t moments_of_round() const { return 2 * static_cast<size_t>(scopes_of_round()); }
};

}  // namespace ebb
