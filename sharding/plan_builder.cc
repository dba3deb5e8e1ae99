#include "ebb/sharding/plan_builder.h"

#include <algorithm>
#include <span>
#include <utility>

namespace ebb::sharding {

void PlanBuilder::BuildStep() {
  carries_ = true;
  WalkScopes();
  Finish();
  Complete();
}

void PlanBuilder::BuildWalk() {
  WalkScopes();
  NewMoment(Moment::kFinish, -1);
  IssueExchange();
  Complete();
}

void PlanBuilder::BuildDrain() {
  carries_ = true;
  Prepare();
  NewMoment(Moment::kBegin, -1);
  for (const Visit& visit : inputs_.model->forward) {
    const int unit = static_cast<int>(visit.unit);
    if (IsCarried(unit) && !updated_[static_cast<size_t>(unit)]) IssueUpdate(unit, next_swap_++);
  }
  NewMoment(Moment::kFinish, -1);
  Complete();
}

void PlanBuilder::Complete() {
  lists_->parts.Close();
  lists_->moves.Close();
  plan_.lists = lists_;
}

void PlanBuilder::WalkScopes() {
  Prepare();
  FindSwaps();
  FindSharedReads();
  FindBoundaries();
  FindEarlyUpdates();
  const std::vector<ScopeTick> ticks = TicksOf(plan_.scopes);
  plan_.moments.reserve(ticks.size() + 2);
  NewMoment(Moment::kBegin, -1);
  Mark();
  IssueSwaps();
  ReadAhead();
  IssueGathers(/*tick=*/0);
  for (const ScopeTick& tick : ticks) {
    if (plan_.scopes[static_cast<size_t>(tick.scope)].round > round_) BeginRound();
    if (tick.opens) {
      Open(tick.scope);
    } else {
      Close(tick.scope);
    }
  }
}

// Slots begin anew in every round, so that all in the middle are the same.
void PlanBuilder::BeginRound() {
  ++round_;
  if (!Repeats()) return;
  next_gradient_slot_ = next_boundary_slot_ = 0;
}

void PlanBuilder::Prepare() {
  const size_t scopes = plan_.scopes.size(), units = plan_.layout.units.size();
  plan_.reduce_of_scope.assign(scopes, -1);
  plan_.gather_of_scope.assign(scopes, -1);
  updated_.assign(units, 0);
  shared_turn_.assign(units, -1);
  master_turn_.assign(plan_.pools.homes.sub_groups.size(), -1);
  contributions_.assign(units, 0);
  contributions_left_.assign(units, 0);
  for (const std::vector<int>& group : reduction_.groups) {
    for (int s : group) ++contributions_left_[plan_.scopes[s].unit];
  }
}

void PlanBuilder::NewMoment(Moment::Kind kind, int scope) {
  const int next = static_cast<int>(plan_.operations.size());
  plan_.moments.push_back({.kind = kind, .scope = scope, .begin = next, .end = next});
}

int PlanBuilder::Issue(const OperationDraft& operation) {
  plan_.operations.push_back({.kind = operation.kind,
                              .stream = operation.stream,
                              .condition = operation.condition,
                              .of_update = operation.of_update,
                              .bytes = operation.bytes,
                              .parts = lists_->parts.KeepOnce(operation.parts),
                              .moves = lists_->moves.KeepOnce(operation.moves)});
  return plan_.moments.back().end++;
}

void PlanBuilder::Mark() {
  Issue({.kind = OperationKind::kMark, .stream = StreamId::kCompute, .parts = {}});
}

void PlanBuilder::Open(int s) {
  NewMoment(Moment::kOpen, s);
  IssueGathers(plan_.scopes[static_cast<size_t>(s)].open_tick);
  BringBoundaries(plan_.scopes[static_cast<size_t>(s)].open_tick);
}

void PlanBuilder::Close(int s) {
  NewMoment(Moment::kClose, s);
  SendBoundaries(plan_.scopes[static_cast<size_t>(s)].close_tick);
  BringBoundaries(plan_.scopes[static_cast<size_t>(s)].close_tick);
  const int group = reduction_.group_of_scope[s];
  if (group >= 0 && reduction_.groups[group].back() == s) IssueReduction(reduction_.groups[group]);
}

// What ranks tell each other has what this one knows: also what became of its swap files, as who
// truncates, replaces or links one has changed what is in it. They are looked at when the caller comes to
// the end of the step, beside what is still to be reduced; a caller that runs ahead of a GPU is there
// long before the exchange, which thus does not stand still for a busy disk.
void PlanBuilder::IssueExchange() {
  Mark();
  const std::span<const int64_t> file_bytes = plan_.pools.file_bytes;
  if (std::any_of(file_bytes.begin(), file_bytes.end(), [](int64_t bytes) { return bytes > 0; })) {
    Issue({.kind = OperationKind::kCheck, .stream = StreamId::kCheck, .parts = {}});
  }
  Issue({.kind = OperationKind::kExchange,
         .stream = StreamId::kReduce,
         .parts = {},
         .bytes = (d_.world - 1) * kExchangeBytes});
}

void PlanBuilder::Finish() {
  NewMoment(Moment::kFinish, -1);
  IssueHeldNorms();
  IssueExchange();
  IssueParameterNorms();
  IssueUpdates();
}

}  // namespace ebb::sharding
