#include "ebb/sharding/lower/op_writer.h"

#include <algorithm>
#include <utility>

namespace ebb::sharding {

OperandWriter::OperandWriter(const Plan& plan)
    : is_walk_(std::none_of(plan.scopes.begin(), plan.scopes.end(),
                            [](const PlannedScope& scope) { return scope.backward; })),
      cells_(static_cast<int>(plan.layout.units.size())) {}

void OperandWriter::Add(const Place& place, Encoding encoding, Access access, int64_t count) {
  operands_.push_back({.place = place,
                       .encoding = encoding,
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

OpWriter::OpWriter(const Plan& plan) : operands_(plan), gather_of_scope_(plan.scopes.size(), -1) {}

void OpWriter::BeginMoment(Moment::Kind kind, int scope) {
  const int next = static_cast<int>(ops_.size());
  moments_.push_back({.kind = kind, .scope = scope, .begin = next, .end = next});
}

int OpWriter::Issue(const OpDraft& draft) {
  std::vector<Operand>& operands = operands_.operands();
  const bool by_parity = std::any_of(operands.begin(), operands.end(), [&](const Operand& operand) {
    return operand.place.pool == StateClass::kControl && operand.access != Access::kNone &&
           operands_.cells().by_parity(operand.place.offset);
  });
  ops_.push_back(
      {.role = draft.role,
       .stream = draft.stream,
       .starts = draft.role == Role::kCastMasters ? EndOf(draft.stream) : LineOf(draft.stream),
       .ends = EndOf(draft.stream),
       .when = draft.when,
       .by_parity = by_parity,
       .divides = draft.divides,
       .goes_on = draft.goes_on,
       .via = draft.via,
       .scope = draft.scope,
       .number = draft.shown ? next_number_++ : -1,
       .bytes = draft.bytes,
       .parts = memory_->parts.KeepOnce(draft.parts),
       .operands =
           draft.repeats ? memory_->operands.KeepOnce(operands) : memory_->operands.Keep(operands),
       .updates = memory_->updates.Keep(draft.updates)});
  operands.clear();
  ++moments_.back().end;
  return ops_.back().number;
}

void OpWriter::IssueKernels(const OpDraft& draft) {
  Issue(draft);
  moments_.back().kernels = moments_.back().end - 1;
}

void OpWriter::Gathers(int scope, int number) {
  gather_of_scope_[scope] = number;
}

void OpWriter::Finish(Plan& plan) && {
  memory_->Close();
  plan.ops = std::move(ops_);
  plan.carries_updates =
      std::any_of(plan.ops.begin(), plan.ops.end(), [](const Op& op) { return op.carried(); });
  plan.moments = std::move(moments_);
  plan.memory = std::move(memory_);
  plan.gather_of_scope = std::move(gather_of_scope_);
}

}  // namespace ebb::sharding
