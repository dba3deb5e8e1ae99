#include "ebb/sharding/plan_builder.h"

#include <algorithm>
#include <span>
#include <utility>

#include "ebb/sharding/conflicts.h"

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
    if (IsCarried(unit) && update_of_unit_[unit] < 0) IssueUpdate(unit, next_swap_++);
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
  const int scopes = static_cast<int>(plan_.scopes.size());
  plan_.moments.reserve(static_cast<size_t>(2 * scopes + 2));
  NewMoment(Moment::kBegin, -1);
  Mark({});
  IssueSwaps(plan_.pools.parameter_slots.count);
  ReadAhead();
  IssueGathers(/*tick=*/0);
  for (int s = 0; s < scopes; ++s) {
    // The rounds to come issue as much as the two that are behind.
    const size_t issued = plan_.operations.size(), rounds = static_cast<size_t>(d_.rounds);
    if (s == scopes / d_.rounds * 2) plan_.operations.reserve(issued + issued * rounds / 2);
    Open(s);
    Close(s);
  }
}

void PlanBuilder::Prepare() {
  const size_t scopes = plan_.scopes.size(), units = plan_.layout.units.size();
  plan_.reduce_of_scope.assign(scopes, -1);
  plan_.gather_of_scope.assign(scopes, -1);
  mark_of_scope_.assign(scopes, -1);
  gradient_reader_.assign(scopes, -1);
  last_gather_.assign(units, -1);
  fill_of_unit_.assign(units, -1);
  ready_of_scope_.assign(scopes, -1);
  gradient_final_.assign(units, -1);
  update_of_unit_.assign(units, -1);
  shared_turn_.assign(units, -1);
  shared_read_.assign(units, -1);
  master_turn_.assign(plan_.pools.homes.sub_groups.size(), -1);
  contributions_.assign(units, 0);
  contributions_left_.assign(units, 0);
  for (const std::vector<int>& group : reduction_.groups) {
    for (int s : group) ++contributions_left_[plan_.scopes[s].unit];
  }
}

void PlanBuilder::NewMoment(Moment::Kind kind, int scope) {
  const int next = static_cast<int>(plan_.operations.size());
  plan_.moments.push_back(
      {.kind = kind, .scope = scope, .begin = next, .end = next, .compute = {}});
}

int PlanBuilder::Issue(const OperationDraft& operation) {
  plan_.operations.push_back({.kind = operation.kind,
                              .stream = operation.stream,
                              .condition = operation.condition,
                              .of_update = operation.of_update,
                              .bytes = operation.bytes,
                              .frees = lists_->slots.Keep(operation.frees),
                              .parts = lists_->parts.KeepOnce(operation.parts),
                              .after = Keep(operation.after),
                              .moves = lists_->moves.KeepOnce(operation.moves)});
  return plan_.moments.back().end++;
}

void PlanBuilder::Frees(int operation, int slot) {
  Operation& freeing = plan_.operations[static_cast<size_t>(operation)];
  std::vector<int> slots(freeing.frees.begin(), freeing.frees.end());
  slots.push_back(slot);
  freeing.frees = lists_->slots.Keep(slots);
}

std::span<const Dependency> PlanBuilder::Keep(std::span<const Dependency> waits) {
  for (const Dependency& dependency : waits) {
    if (dependency.kind == Dependency::kOperation)
      plan_.operations[static_cast<size_t>(dependency.index)].awaited = true;
  }
  return lists_->dependencies.Keep(waits);
}

int PlanBuilder::Mark(std::vector<Part> parts) {
  return Issue({.kind = OperationKind::kMark,
                .stream = StreamId::kCompute,
                .parts = std::move(parts),
                .after = {}});
}

void PlanBuilder::Open(int s) {
  NewMoment(Moment::kOpen, s);
  const PlannedScope& scope = plan_.scopes[s];
  IssueGathers(OpenTick(s));
  BringBoundaries(s);
  std::vector<Dependency> waits;
  if (d_.kept_whole[scope.unit]) {
    waits.push_back({Dependency::kUpdated, scope.unit});
  } else {
    waits.push_back({Dependency::kOperation, ready_of_scope_[s]});
  }
  if (scope.backward && d_.trainable[scope.unit]) WaitForGradientMemory(s, waits);
  WaitForBoundaries(s, waits);
  plan_.moments.back().compute = Keep(waits);
}

void PlanBuilder::Close(int s) {
  NewMoment(Moment::kClose, s);
  const int unit = plan_.scopes[s].unit;
  mark_of_scope_[s] = Mark({{unit, s}});
  if (!d_.kept_whole[unit]) {
    const auto [begin, end] = GatherMemory(plan_, unit);
    slots_used_.Use(begin, end, s);
  }
  SendBoundaries(s);
  const int group = reduction_.group_of_scope[s];
  if (group >= 0 && reduction_.groups[group].back() == s) IssueReduction(reduction_.groups[group]);
}

// What ranks tell each other has what this one knows: also what became of its swap files, as who
// truncates, replaces or links one has changed what is in it. They are looked at when the caller comes to
// the end of the step, beside what is still to be reduced; a caller that runs ahead of a GPU is there
// long before the exchange, which thus does not stand still for a busy disk.
void PlanBuilder::IssueExchange() {
  std::vector<Dependency> after = {{Dependency::kOperation, Mark({})}};
  if (last_host_sum_ >= 0) after.push_back({Dependency::kOperation, last_host_sum_});
  const std::span<const int64_t> file_bytes = plan_.pools.file_bytes;
  if (std::any_of(file_bytes.begin(), file_bytes.end(), [](int64_t bytes) { return bytes > 0; })) {
    const int check = Issue(
        {.kind = OperationKind::kCheck, .stream = StreamId::kCheck, .parts = {}, .after = {}});
    after.push_back({Dependency::kOperation, check});
  }
  exchange_ = Issue({.kind = OperationKind::kExchange,
                     .stream = StreamId::kReduce,
                     .parts = {},
                     .after = std::move(after),
                     .bytes = (d_.world - 1) * kExchangeBytes});
}

void PlanBuilder::Finish() {
  NewMoment(Moment::kFinish, -1);
  IssueExchange();
  IssueParameterNorms();
  IssueUpdates();
  if (d_.timing == UpdateTiming::kOff) {
    std::vector<Dependency> updated;
    for (int u = 0; u < static_cast<int>(plan_.layout.units.size()); ++u) {
      if (d_.trainable[u]) updated.push_back({Dependency::kUpdated, u});
    }
    plan_.moments.back().compute = Keep(updated);
  }
}

}  // namespace ebb::sharding
