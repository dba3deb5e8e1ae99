// The operations of a plan as emitters write them, moment by moment, each with its operands.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/operands.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb::sharding {

// Writes the operands of a step's or walk's operations, one operation after the other.
class OperandWriter {
 public:
  explicit OperandWriter(const Plan& plan);

  const ControlCells& cells() const { return cells_; }
  bool is_walk() const { return is_walk_; }
  int64_t sums() const { return is_walk_ ? cells_.walk_sums() : cells_.sums(); }
  int64_t record() const { return is_walk_ ? cells_.walk_record() : cells_.record(); }
  int64_t records() const { return is_walk_ ? cells_.walk_records() : cells_.records(); }

  void Add(const Place& place, Encoding encoding, Access access, int64_t count);
  void AddBytes(const Place& place, Access access, int64_t bytes);
  void AddControl(int64_t cell, Access access, int64_t count = 1);
  // Reads one place and writes the other. Returns the bytes.
  int64_t Move(StateClass state, const Place& from, const Place& to, int64_t bytes);

  std::vector<Operand>& operands() { return operands_; }

 private:
  const bool is_walk_;
  const ControlCells cells_;
  std::vector<Operand> operands_;
};

// An operation with lists that may still grow.
struct OpDraft {
  Role role{};
  StreamId stream{};
  std::vector<Part> parts = {};
  int64_t bytes = 0;
  When when = When::kAlways;
  std::vector<UpdateDetail> updates = {};
  std::optional<DType> via = {};
  bool divides = false, goes_on = false;
  int scope = -1;
  bool shown = true;    // in tables
  bool repeats = true;  // other operations may have the same operands
};

class OpWriter {
 public:
  explicit OpWriter(const Plan& plan);

  void BeginMoment(Moment::Kind kind, int scope);
  // The operands of the next operation.
  OperandWriter& operands() { return operands_; }
  // Adds it to the newest moment; returns its number.
  int Issue(const OpDraft& draft);
  // Likewise the kernels that end with the next moment.
  void IssueKernels(const OpDraft& draft);
  // Notes the gather that serves the scope.
  void Gathers(int scope, int number);

  // Moves all that was written into the plan.
  void Finish(Plan& plan) &&;

 private:
  OperandWriter operands_;
  std::vector<Op> ops_;
  int next_number_ = 0;
  std::vector<Moment> moments_;
  std::shared_ptr<OpMemory> memory_ = std::make_shared<OpMemory>();
  std::vector<int> gather_of_scope_;
};

}  // namespace ebb::sharding
