// An evaluation while a step is open, between its scopes: the step's progress waits aside, walks run as
// always, in places where parameters of the step are on their way, and then those are brought again.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

using sharding::OperationKind;

// While something is alive.
absl::Status Executor::MayEvaluate() const {
  if (progress_.evaluation) {
    return absl::FailedPreconditionError(
        "BeginEvaluation while another Evaluation of the same engine is alive: finish or drop that "
        "one first");
  }
  if (!open_.empty()) {
    const OpenScope& open = open_.front();
    return absl::FailedPreconditionError(
        absl::StrCat("BeginEvaluation while ", ScopeName(open.backward, open.unit),
                     " of a Step of the same engine is open: close that scope first"));
  }
  const sharding::Plan& plan = progress_.run->plan;
  const int of_round = static_cast<int>(plan.scopes.size()) / plan.decisions.rounds;
  if (OwnsBoundaries() && progress_.order.next() % of_round != 0) {
    return absl::FailedPreconditionError(
        "BeginEvaluation within a round of a Step, whose boundary activations lie where those of "
        "an "
        "evaluation go (Visit::output_bytes): evaluate between rounds, or between steps");
  }
  for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
    if (!UpdateHasStarted(unit)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("BeginEvaluation in a Step after the update of unit '", plan.unit_names[unit],
                     "' has started, so parameters of two steps would be shown: evaluate before "
                     "the last round's "
                     "first Backward, or set ebb.asynchronous_step to late"));
  }
  return absl::OkStatus();
}

void Executor::SuspendStep() {
  TakeViewErrors();
  AwaitReaders();
  IssueCarriedLeft();  // walks see the finished updates
  std::swap(progress_, outer_);
}

void Executor::ResumeStep() {
  std::swap(progress_, outer_);
  view_errors_.Begin(last_scope_id_);
  if (!outer_misuse_.ok()) errors_.Note(std::exchange(outer_misuse_, absl::OkStatus()));
  CollectSpans(progress_.run);
  AwaitReaders();
  for (int unit = 0; unit < static_cast<int>(model_.units.size()); ++unit)
    if (IsGathered(unit)) GatherAlone(unit);
  HoldBehindCompute();
  ReadSlotsAgain();
}

// What was read for a gather or an update that is still to come.
void Executor::ReadSlotsAgain() {
  Runnable& run = *progress_.run;
  const std::vector<sharding::Operation>& operations = run.plan.operations;
  std::vector<int> reads;
  for (size_t index = 0; index < operations.size(); ++index) {
    if (run.issued[index]) continue;
    for (const sharding::Dependency& dependency : operations[index].after) {
      if (dependency.kind != sharding::Dependency::kOperation) continue;
      const size_t before = static_cast<size_t>(dependency.index);
      const OperationKind kind = operations[before].kind;
      if (run.issued[before] && operations[before].stream == sharding::StreamId::kReadParameters &&
          (kind == OperationKind::kRead || kind == OperationKind::kNarrow))
        reads.push_back(dependency.index);
    }
  }
  std::sort(reads.begin(), reads.end());
  reads.erase(std::unique(reads.begin(), reads.end()), reads.end());
  for (int read : reads) {
    run.issued[static_cast<size_t>(read)] = 0;
    Issue(read);
  }
}

// Whether a call of this step or evaluation may go on. What is asked of a step while an evaluation in it is
// alive fails the step.
bool Executor::IsOpen(int64_t number, std::string_view call) {
  if (progress_.alive && progress_.number == number) return true;
  if (outer_.alive && outer_.number == number && outer_misuse_.ok()) {
    outer_misuse_ = absl::FailedPreconditionError(absl::StrCat(
        std::string(call),
        " of a Step while an Evaluation in it is alive: finish or drop that one first"));
  }
  return false;
}

}  // namespace ebb
