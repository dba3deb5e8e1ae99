// What the config means for this model and world: which units are kept whole, which gradients are
// summed where, when updates run.
#pragma once

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// `rounds` 0: the config's.
absl::StatusOr<Decisions> Decide(const PlanInputs& inputs, const ModelLayout& layout, int rounds,
                                 bool hold_updates);

// Upper limits of bytes in one group of gathers and one of reductions.
int64_t GatherGroupElements(const Config& config, DType compute);
int64_t ReduceGroupBytes(const Config& config);

}  // namespace ebb::sharding
