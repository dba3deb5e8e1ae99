#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {

Place WholePlace(const Plan& plan, int unit, bool trainable) {
  const UnitAddresses& at = plan.pools.units[static_cast<size_t>(unit)];
  if (plan.decisions.kept_whole[static_cast<size_t>(unit)])
    return DevicePlace(StateClass::kParameter,
                       trainable ? at.parameter_trainable : at.parameter_frozen);
  return DevicePlace(StateClass::kGather, trainable ? at.gather_trainable : at.gather_frozen);
}

Place SlicePlace(const Plan& plan, int unit, bool trainable) {
  const Decisions& d = plan.decisions;
  if (d.kept_whole[static_cast<size_t>(unit)] || d.parameter_tier != Tier::kDevice) {
    Place place = WholePlace(plan, unit, trainable);
    place.per_slice = SectionOf(plan, unit, trainable).shard * SizeOf(d.compute_of(unit));
    return place;
  }
  const UnitAddresses& at = plan.pools.units[static_cast<size_t>(unit)];
  return DevicePlace(StateClass::kParameter,
                     trainable ? at.parameter_trainable : at.parameter_frozen);
}

Place GradientSlicePlace(const Plan& plan, int unit) {
  Place place = plan.pools.GradientShard(unit);
  if (plan.decisions.stage == 0)
    place.per_slice = SectionOf(plan, unit, true).shard * SizeOf(plan.decisions.shard_dtype(unit));
  return place;
}

Place WholeGradientPlace(const Plan& plan, int visit) {
  return DevicePlace(StateClass::kGradient, plan.pools.visits[static_cast<size_t>(visit)].gradient);
}

Place OutputPlace(const Plan& plan, int visit, int index_in_round) {
  const VisitAddresses& at = plan.pools.visits[static_cast<size_t>(visit)];
  return DevicePlace(StateClass::kActivation, at.output + index_in_round * at.boundary_stride);
}

Place OutputGradientPlace(const Plan& plan, int visit, int index_in_round) {
  const VisitAddresses& at = plan.pools.visits[static_cast<size_t>(visit)];
  return DevicePlace(StateClass::kActivation,
                     at.output_gradient + index_in_round * at.boundary_stride);
}

Place WalkOutputPlace(const Plan& plan, int visit, int micro_batch) {
  return DevicePlace(StateClass::kActivation,
                     (2 * micro_batch + visit % 2) * plan.pools.evaluation_stride);
}

void AddGather(const Plan& plan, int unit, std::vector<Operand>& operands) {
  const DType dtype = plan.decisions.compute_of(unit);
  for (const bool trainable : {true, false}) {
    const Section& section = SectionOf(plan, unit, trainable);
    if (section.shard == 0) continue;
    operands.push_back({.place = SlicePlace(plan, unit, trainable),
                        .dtype = dtype,
                        .access = Access::kRead,
                        .count = section.shard});
    operands.push_back({.place = WholePlace(plan, unit, trainable),
                        .dtype = dtype,
                        .access = Access::kWrite,
                        .count = section.elements});
  }
}

}  // namespace ebb::sharding
