#include "ebb/sharding/fingerprint.h"

namespace ebb::sharding {

uint64_t Fingerprint(const ParameterSpec& parameter) {
  Hasher hasher;
  hasher.Add(parameter.name).Add(parameter.group).Add(parameter.trainable).Add(parameter.cut_rows);
  if (parameter.compute) hasher.Add(static_cast<int64_t>(*parameter.compute));
  for (int64_t dimension : parameter.shape) hasher.Add(dimension);
  return hasher.hash();
}

uint64_t Fingerprint(const ModelSpec& model) {
  Hasher hasher;
  for (const ParameterSpec& parameter : model.parameters)
    hasher.Add(static_cast<int64_t>(Fingerprint(parameter)));
  for (const UnitSpec& unit : model.units) {
    hasher.Add(unit.name);
    for (ParameterId id : unit.parameters) hasher.Add(static_cast<int64_t>(id));
    hasher.Add(int64_t{unit.keep_whole});
  }
  for (const Visit& visit : model.forward) {
    hasher.Add(static_cast<int64_t>(visit.unit)).Add(visit.output_bytes);
    hasher.Add(visit.forward).Add(visit.backward).Add(visit.gradients);
  }
  for (const ScopeEvent& event : model.order)
    hasher.Add(event.opens).Add(event.backward).Add(event.recompute).Add(event.visit);
  return hasher.Add(model.workspace_bytes).Add(model.workspace_untouched_bytes).hash();
}

namespace {

void AddPlace(Hasher& hasher, const Place& place, Access access = Access::kNone) {
  const int which = (static_cast<int>(place.tier) * 16 + static_cast<int>(place.pool)) * 8 +
                    static_cast<int>(access) * 2 + (place.of_secondary ? 1 : 0);
  hasher.Add(which).Add(place.offset).Add(place.per_slice);
}

}  // namespace

uint64_t Fingerprint(const Plan& plan) {
  Hasher hasher;
  for (const Operation& operation : plan.operations) {
    hasher.Add(static_cast<int64_t>(operation.kind))
        .Add(static_cast<int64_t>(operation.stream))
        .Add(static_cast<int64_t>(operation.condition))
        .Add(operation.bytes);
    for (const Part& part : operation.parts)
      hasher.Add(part.unit).Add(part.scope).Add(part.first).Add(part.last);
    for (const Operand& operand : operation.operands) {
      AddPlace(hasher, operand.place, operand.access);
      hasher.Add(operand.bytes());
    }
    for (const UpdateDetail& update : operation.updates) hasher.Add(update.sub_group);
  }
  for (const Moment& moment : plan.moments) {
    hasher.Add(moment.kind).Add(moment.scope);
    for (int operation : moment.operations()) hasher.Add(operation);
  }
  for (const int64_t* bytes : {plan.pools.bytes, plan.pools.host_bytes, plan.pools.file_bytes}) {
    for (int c = 0; c < kStateClasses; ++c) hasher.Add(bytes[c]);
  }
  for (const SubGroup& group : plan.pools.placement.sub_groups) {
    hasher.Add(group.unit).Add(group.begin).Add(group.end).Add(group.states_stride);
    AddPlace(hasher, group.master);
    AddPlace(hasher, group.states);
  }
  for (const UnitAddresses& unit : plan.pools.units) {
    hasher.Add(unit.parameter_trainable).Add(unit.gradient_shard).Add(unit.gather_trainable);
    hasher.Add(unit.secondary_trainable);
  }
  for (const VisitAddresses& visit : plan.pools.visits)
    hasher.Add(visit.gradient).Add(visit.output).Add(visit.output_gradient);
  return hasher.hash();
}

}  // namespace ebb::sharding
