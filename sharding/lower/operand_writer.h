// Writes the operands of a plan's instructions, of a step or walk, one instruction after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/operands.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb::sharding {

class OperandWriter {
 public:
  explicit OperandWriter(const Plan& plan);

  const ControlCells& cells() const { return cells_; }
  bool is_walk() const { return is_walk_; }
  int64_t sums() const { return is_walk_ ? cells_.walk_sums() : cells_.sums(); }
  int64_t record() const { return is_walk_ ? cells_.walk_record() : cells_.record(); }
  int64_t records() const { return is_walk_ ? cells_.walk_records() : cells_.records(); }

  void Add(const Place& place, DType dtype, Access access, int64_t count);
  void AddBytes(const Place& place, Access access, int64_t bytes);
  void AddControl(int64_t cell, Access access, int64_t count = 1);

  std::vector<Operand>& operands() { return operands_; }

 private:
  const bool is_walk_;
  const ControlCells cells_;
  std::vector<Operand> operands_;
};

}  // namespace ebb::sharding
