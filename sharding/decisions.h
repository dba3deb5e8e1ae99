// Decisions of the config for this model and world: which units are kept whole, which gradients are
// summed where, when updates run.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// `rounds`: of the step; 0: as the config says.
absl::StatusOr<Decisions> Decide(const PlanInputs& inputs, const ModelLayout& layout, int rounds,
                                 bool hold_updates);

// Upper limits of the elements in one group of gathers and in one group of reductions.
int64_t GatherGroupElements(const Config& config, DType compute);
int64_t ReduceGroupBytes(const Config& config);

// Elements of each unit's slice in a parameter slot, counted in the configured dtype. The part that
// stays in RAM is not known yet; this counts as if it were none.
std::vector<int64_t> SlotElements(const ModelLayout& layout, const Decisions& decisions);
// The most elements in a parameter slot, for all that share it: offload_param.buffer_size, even if
// a slice has more. If it is not given, there is room for each.
int64_t SlotElementsMax(const Config& config, const ModelLayout& layout,
                        const Decisions& decisions);

}  // namespace ebb::sharding
