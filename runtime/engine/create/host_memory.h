// Whether the host has the memory that Create is about to take.
#pragma once

#include "absl/status/status.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/sharding/plan.h"

namespace ebb {

// Collective.
absl::Status CheckHostMemory(const EngineInputs& inputs, const sharding::Pools& pools,
                             const HostLane& lane);

}  // namespace ebb
