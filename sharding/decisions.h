// What the config means for this model and world: which units are kept whole, which gradients are
// summed where, when updates run.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// `rounds` 0: the config's.
absl::StatusOr<Decisions> Decide(const PlanInputs& inputs, const ModelLayout& layout, int rounds,
                                 bool hold_updates);

// Upper limits of bytes in one group of gathers and one of reductions.
int64_t GatherGroupElements(const Config& config, DType compute);
int64_t ReduceGroupBytes(const Config& config);

// Elements that each unit's slice has in a parameter slot. How much of it stays in RAM is not known
// yet: as if nothing did.
std::vector<int64_t> SlotElements(const ModelLayout& layout, DType compute);
// At most, in a parameter slot, whatever shares it: offload_param.buffer_size, which may be less than
// a slice has. Not given: room for each.
int64_t SlotElementsMax(const Config& config, const ModelLayout& layout, DType compute);

}  // namespace ebb::sharding
