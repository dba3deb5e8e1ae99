#include "ebb/sharding/operands.h"

#include <algorithm>

#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {

OperandWriter::OperandWriter(const Plan& plan)
    : plan_(plan),
      is_walk_(std::none_of(plan.scopes.begin(), plan.scopes.end(),
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

bool OperandWriter::by_parity() const {
  return std::any_of(operands_.begin(), operands_.end(), [&](const Operand& operand) {
    return operand.place.pool == StateClass::kControl && operand.access != Access::kNone &&
           cells_.by_parity(operand.place.offset);
  });
}

namespace {

// This rank's part of a unit just gathered into its secondary shard, or the unit from those of all ranks of a group.
void AddSecondary(int unit, bool fills, OperandWriter& to) {
  const Plan& plan = to.plan();
  const Decisions& d = plan.decisions;
  for (const bool trainable : {true, false}) {
    const Section& section = SectionOf(plan, unit, trainable);
    const int64_t count = d.SecondaryShard(section);
    if (count == 0) continue;
    const UnitAddresses& at = plan.pools.units[static_cast<size_t>(unit)];
    const Place secondary = DevicePlace(StateClass::kSecondary,
                                        trainable ? at.secondary_trainable : at.secondary_frozen);
    Place whole = WholePlace(plan, unit, trainable);
    if (fills) {
      whole.per_slice = count * SizeOf(d.compute);
      whole.of_secondary = true;
      to.Add(whole, d.compute, Access::kRead, count);
      to.Add(secondary, d.compute, Access::kWrite, count);
    } else {
      to.Add(secondary, d.compute, Access::kRead, count);
      to.Add(whole, d.compute, Access::kWrite, section.elements);
    }
  }
}

void AddRefresh(int unit, OperandWriter& to) {
  const Plan& plan = to.plan();
  const Section& section = SectionOf(plan, unit, true);
  to.Add(SlicePlace(plan, unit, true), plan.decisions.compute, Access::kRead, section.shard);
  to.Add(WholePlace(plan, unit, true), plan.decisions.compute, Access::kWrite, section.elements);
}

void AddNarrowing(const Narrowing& of, OperandWriter& to) {
  const Plan& plan = to.plan();
  const int64_t count = plan.pools.homes.sub_groups[static_cast<size_t>(of.sub_group)].count();
  to.Add(of.master, DType::kFloat32, Access::kRead, count);
  to.Add(of.parameter, plan.decisions.compute, Access::kWrite, count);
}

}  // namespace

void AddOperands(const Operation& operation, OperandWriter& to) {
  const Plan& plan = to.plan();
  switch (operation.kind) {
    case OperationKind::kMark:  // outside of scopes a trainer may add to the loss
      return to.AddControl(to.sums(), Access::kReadWrite);
    case OperationKind::kGather:
      for (const Part& part : operation.parts) AddGather(plan, part.unit, to.operands());
      return;
    case OperationKind::kFillSecondary:
    case OperationKind::kGatherSecondary:
      for (const Part& part : operation.parts)
        AddSecondary(part.unit, operation.kind == OperationKind::kFillSecondary, to);
      return;
    case OperationKind::kRefresh:
      for (const Part& part : operation.parts) AddRefresh(part.unit, to);
      return;
    case OperationKind::kNarrow:
      for (const Part& part : operation.parts)
        AddNarrowing(plan.narrowings[static_cast<size_t>(part.work)], to);
      return;
    case OperationKind::kGatherGradient:
    case OperationKind::kCast:
    case OperationKind::kReduce:
    case OperationKind::kAllReduce:
    case OperationKind::kRound:
    case OperationKind::kAccumulate:
    case OperationKind::kNorm:
      return AddReductionOperands(operation, to);
    case OperationKind::kParameterNorms:
    case OperationKind::kUpdate:
      return AddUpdateOperands(operation, to);
    case OperationKind::kExchange:
      return AddExchangeOperands(to);
    case OperationKind::kExchangeNorms:
      return AddNormExchangeOperands(to);
    case OperationKind::kCheck:
      return to.AddControl(to.files(), Access::kWrite);
    case OperationKind::kRead:
    case OperationKind::kUpload:
    case OperationKind::kDownload:
    case OperationKind::kWrite:
      for (const Move& move : operation.moves) {
        to.AddBytes(move.from, Access::kRead, move.bytes);
        to.AddBytes(move.to, Access::kWrite, move.bytes);
      }
  }
}

}  // namespace ebb::sharding
