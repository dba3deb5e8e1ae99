#include "ebb/sharding/lower/plan_writer.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace ebb::sharding {

OperandWriter::OperandWriter(const Plan& plan)
    : is_walk_(std::none_of(plan.scopes.begin(), plan.scopes.end(),
                            [](const PlannedScope& scope) { return scope.backward; })),
      cells_(static_cast<int>(plan.layout.units.size())) {}

void OperandWriter::Add(const Place& place, DType dtype, Access access, int64_t count) {
  operands_.push_back({.place = place,
                       .dtype = dtype,
                       .access = count > 0 ? access : Access::kNone,
                       .count = count});
}

void OperandWriter::AddBytes(const Place& place, Access access, int64_t bytes) {
  Add(place, DType::kInt8, access, bytes);
}

void OperandWriter::AddControl(int64_t cell, Access access, int64_t count) {
  operands_.push_back({.place = {.tier = Tier::kCpu, .pool = StateClass::kControl, .offset = cell},
                       .access = access,
                       .count = count});
}

int64_t OperandWriter::Move(StateClass state, const Place& from, const Place& to, int64_t bytes) {
  const auto add = [&](const Place& place, Access access) {
    operands_.push_back({.place = place, .access = access, .content = state, .count = bytes});
  };
  add(from, Access::kRead);
  add(to, Access::kWrite);
  return bytes;
}

namespace {

void MarkReleases(Plan& plan) {
  absl::flat_hash_map<std::pair<int, int>, PlannedScope*> last;  // by gather and unit
  for (size_t s = 0; s < plan.scopes.size(); ++s) {
    PlannedScope& scope = plan.scopes[s];
    const int gather = plan.gather_of_scope[s];
    if (gather < 0) continue;
    PlannedScope*& newest = last.try_emplace({gather, scope.unit}, &scope).first->second;
    if (newest->close_tick < scope.close_tick) newest = &scope;
  }
  for (const auto& [key, scope] : last) scope->releases = true;
}

}  // namespace

void PlanLists::Close() {
  parts.Close();
  operands.Close();
}

int64_t PlanLists::bytes() const {
  return parts.bytes() + operands.bytes() + updates.bytes();
}

PlanWriter::PlanWriter(const Plan& plan)
    : operands_(plan), gather_of_scope_(plan.scopes.size(), -1) {}

void PlanWriter::BeginMoment(Moment::Kind kind, int scope) {
  const int next = static_cast<int>(operations_.size());
  moments_.push_back({.kind = kind, .scope = scope, .begin = next, .end = next});
}

int PlanWriter::Issue(const OperationDraft& operation) {
  operations_.push_back({.kind = operation.kind,
                         .stream = operation.stream,
                         .condition = operation.condition,
                         .bytes = operation.bytes,
                         .parts = lists_->parts.KeepOnce(operation.parts),
                         .operands = lists_->operands.KeepOnce(operands_.operands()),
                         .updates = lists_->updates.Keep(operation.updates)});
  operands_.operands().clear();
  return moments_.back().end++;
}

void PlanWriter::Gathers(int scope, int operation) {
  gather_of_scope_[scope] = operation;
}

void PlanWriter::Finish(Plan& plan) && {
  lists_->Close();
  plan.operations = std::move(operations_);
  plan.carries_updates = std::any_of(
      plan.operations.begin(), plan.operations.end(),
      [](const Operation& operation) { return operation.condition == Condition::kCarrying; });
  plan.moments = std::move(moments_);
  plan.lists = std::move(lists_);
  plan.gather_of_scope = std::move(gather_of_scope_);
  MarkReleases(plan);
}

}  // namespace ebb::sharding
