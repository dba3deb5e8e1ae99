// Where a unit is on the device while it is used, and where this rank's slices of it are there;
// likewise what visits write there.
#pragma once

#include <vector>

#include "ebb/sharding/instructions.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

inline Place DevicePlace(StateClass pool, int64_t offset) {
  return {.pool = pool, .offset = offset};
}
inline Place StagingPlace(int64_t offset) {
  return DevicePlace(StateClass::kStaging, offset);
}

// A section whole: in its slot, or where it is kept whole.
Place WholePlace(const Plan& plan, int unit, bool trainable);
// This rank's slice of a section, where a gather reads it: in place, unless the slice is on the
// device in a pool of its own.
Place SlicePlace(const Plan& plan, int unit, bool trainable);
// This rank's slice of the reduced gradient.
Place GradientSlicePlace(const Plan& plan, int unit);

// Places of a visit: its whole gradient; boundaries of a micro-batch of a round, or of a walk.
Place WholeGradientPlace(const Plan& plan, int visit);
Place OutputPlace(const Plan& plan, int visit, int index_in_round = 0);
Place OutputGradientPlace(const Plan& plan, int visit, int index_in_round = 0);
Place WalkOutputPlace(const Plan& plan, int visit, int micro_batch);

// Operands of an all-gather of the unit.
void AddGather(const Plan& plan, int unit, std::vector<Operand>& operands);

inline const Section& SectionOf(const Plan& plan, int unit, bool trainable) {
  const UnitLayout& layout = plan.layout.units[static_cast<size_t>(unit)];
  return trainable ? layout.trainable : layout.frozen;
}
// Elements of a unit's trainable section that a rank updates: its slice; at stage 0 the whole
// section, because every rank updates all of it.
struct UpdatedElements {
  int64_t begin = 0, count = 0;
};
inline UpdatedElements UpdatedBy(const Plan& plan, int unit, int slice) {
  const Section& section = SectionOf(plan, unit, true);
  if (plan.decisions.stage == 0) return {0, section.elements};
  return {slice * section.shard, section.shard};
}

}  // namespace ebb::sharding
