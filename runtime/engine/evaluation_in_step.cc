// An evaluation while a step is open, between its scopes: the step's progress waits aside, walks run as
// always, in places where parameters of the step are on their way, and then those are brought again.
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
        absl::StrCat("BeginEvaluation while ", ScopeName(open.kind, open.unit),
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
  // Walks see the finished updates; what the plan has left of them, the step then reads.
  if (carries_) {
    IssueCarriedLeft();
    if (absl::StatusOr<LinkedFragment*> rest = Link(*progress_.run, /*carrying=*/false);
        rest.ok()) {
      progress_.fragment = *rest;
    } else {
      errors_.Fail(rest.status());
    }
  }
  issuer_->WaitIdle();
  std::swap(progress_, outer_);
}

void Executor::ResumeStep() {
  std::swap(progress_, outer_);
  view_errors_.Begin(last_scope_id_);
  if (!outer_misuse_.ok()) errors_.Note(std::exchange(outer_misuse_, absl::OkStatus()));
  CollectSpans(progress_.run);
  issuer_->WaitIdle();
  for (int unit = 0; unit < static_cast<int>(model_.units.size()); ++unit)
    if (IsGathered(unit)) GatherAlone(unit);
  issuer_->Fence();
  ReadSlotsAgain();
}

// What was read for a gather or an update that is still to come.
void Executor::ReadSlotsAgain() {
  const std::vector<sharding::Instruction>& instructions =
      progress_.fragment->fragment().instructions;
  std::vector<int> brought_by(static_cast<size_t>(cells_->count()),
                              -1);  // by cell: a read, or a copy of it
  std::vector<uint8_t> again(instructions.size(), 0);
  std::vector<sharding::CellRange> ranges;
  for (int index = 0; index < static_cast<int>(instructions.size()); ++index) {
    const sharding::Instruction& instruction = instructions[static_cast<size_t>(index)];
    const bool brings = instruction.stream == sharding::StreamId::kReadParameters;
    for (const sharding::Operand& operand : instruction.operands) {
      if (operand.place.tier != Tier::kCpu || operand.place.pool == StateClass::kControl) continue;
      ranges.clear();
      cells_->Find(operand, ranges);
      for (const auto& [begin, end] : ranges) {
        for (int cell = begin; cell < end; ++cell) {
          int& source = brought_by[static_cast<size_t>(cell)];
          if (sharding::Reads(operand.access) && source >= 0 && index >= issued())
            again[static_cast<size_t>(source)] = 1;
          if (sharding::Writes(operand.access)) source = brings && index < issued() ? index : -1;
        }
      }
    }
  }
  // Copies of masters are made of what is read with them.
  for (int index = issued() - 1; index > 0; --index) {
    if (again[static_cast<size_t>(index)] == 0 ||
        instructions[static_cast<size_t>(index)].role != OperationKind::kNarrow)
      continue;
    for (int read = index - 1; read >= 0; --read) {
      const sharding::Instruction& before = instructions[static_cast<size_t>(read)];
      if (before.code != sharding::Code::kRead ||
          before.stream != sharding::StreamId::kReadParameters)
        continue;
      const bool masters = before.operands.front().place.pool == StateClass::kMaster;
      again[static_cast<size_t>(read)] |= masters ? 1 : 0;
      if (masters) break;
    }
  }
  for (int index = 0; index < issued(); ++index)
    if (again[static_cast<size_t>(index)] != 0) Issue(index, index + 1);
  issuer_->Fence();
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
