// Which memory each of the plan's operations touches, as operands of its instruction.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/instructions.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

inline Place DevicePlace(StateClass pool, int64_t offset, int64_t per_slice = 0) {
  return {.tier = Tier::kDevice, .pool = pool, .offset = offset, .per_slice = per_slice};
}
inline Place StagingPlace(int64_t offset) {
  return DevicePlace(StateClass::kStaging, offset);
}

// Of one instruction after the other.
class OperandWriter {
 public:
  explicit OperandWriter(const Plan& plan);

  const Plan& plan() const { return plan_; }
  const ControlCells& cells() const { return cells_; }
  bool is_walk() const { return is_walk_; }
  int64_t sums() const { return is_walk_ ? cells_.of_walks() : cells_.sums(); }
  int64_t files() const { return is_walk_ ? cells_.of_walks() + 1 : cells_.files(); }

  void Add(const Place& place, DType dtype, Access access, int64_t count);
  void AddBytes(const Place& place, Access access, int64_t bytes);
  void AddControl(int64_t cell, Access access, int64_t count = 1);

  std::vector<Operand>& operands() { return operands_; }
  // Whether any of them is there by parity.
  bool by_parity() const;

 private:
  const Plan& plan_;
  const bool is_walk_;
  const ControlCells cells_;
  std::vector<Operand> operands_;
};

void AddOperands(const Operation& operation, OperandWriter& to);
// Of those that reduce gradients and sum and square what is left of them.
void AddReductionOperands(const Operation& operation, OperandWriter& to);
// Of an update, and of what LAMB and LARS know of parameters before it.
void AddUpdateOperands(const Operation& operation, OperandWriter& to);
// By part, of those that have some.
std::vector<UpdateDetail> UpdateDetailsOf(const Plan& plan, const Operation& operation);
void AddExchangeOperands(OperandWriter& to);
void AddNormExchangeOperands(OperandWriter& to);

}  // namespace ebb::sharding
