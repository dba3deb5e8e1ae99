#include "ebb/sharding/lower/operand_writer.h"

#include <algorithm>

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

}  // namespace ebb::sharding
