#include "ebb/sharding/plan_builder.h"

#include <utility>

namespace ebb::sharding {

void PlanBuilder::BuildStep() {
  carries_ = true;
  WalkScopes();
  Finish();
}

void PlanBuilder::BuildWalk() {
  WalkScopes();
  NewMoment(Moment::kFinish, -1);
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
}

void PlanBuilder::WalkScopes() {
  Prepare();
  FindSwaps();
  FindSharedReads();
  FindBoundaries();
  FindEarlyUpdates();
  NewMoment(Moment::kBegin, -1);
  Mark({});
  IssueSwaps(plan_.pools.parameter_slots.count);
  ReadAhead();
  IssueGathers(/*tick=*/0);
  for (int s = 0; s < static_cast<int>(plan_.scopes.size()); ++s) {
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
  plan_.moments.push_back({.kind = kind, .scope = scope, .operations = {}, .compute = {}});
}

int PlanBuilder::Issue(Operation operation) {
  const int index = static_cast<int>(plan_.operations.size());
  plan_.operations.push_back(std::move(operation));
  plan_.moments.back().operations.push_back(index);
  return index;
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
  std::vector<Dependency>& waits = plan_.moments.back().compute;
  if (d_.kept_whole[scope.unit]) {
    waits.push_back({Dependency::kUpdated, scope.unit});
  } else {
    waits.push_back({Dependency::kOperation, plan_.gather_of_scope[s]});
  }
  if (scope.backward && d_.trainable[scope.unit]) WaitForGradientMemory(s, waits);
  WaitForBoundaries(s, waits);
}

void PlanBuilder::Close(int s) {
  NewMoment(Moment::kClose, s);
  const int unit = plan_.scopes[s].unit;
  mark_of_scope_[s] = Mark({{unit, s}});
  if (!d_.kept_whole[unit]) {
    const auto [begin, end] = SlotOf(unit);
    slots_used_.Use(begin, end, s);
  }
  SendBoundaries(s);
  const int group = reduction_.group_of_scope[s];
  if (group >= 0 && reduction_.groups[group].back() == s) IssueReduction(reduction_.groups[group]);
}

void PlanBuilder::Finish() {
  NewMoment(Moment::kFinish, -1);
  std::vector<Dependency> after = {{Dependency::kOperation, Mark({})}};
  if (last_host_sum_ >= 0) after.push_back({Dependency::kOperation, last_host_sum_});
  exchange_ = Issue({.kind = OperationKind::kExchange,
                     .stream = StreamId::kReduce,
                     .parts = {},
                     .after = std::move(after),
                     .bytes = (d_.world - 1) * kExchangeBytes});
  IssueUpdates();
  if (d_.timing == UpdateTiming::kOff) {
    for (int u = 0; u < static_cast<int>(plan_.layout.units.size()); ++u) {
      if (d_.trainable[u]) plan_.moments.back().compute.push_back({Dependency::kUpdated, u});
    }
  }
}

}  // namespace ebb::sharding
