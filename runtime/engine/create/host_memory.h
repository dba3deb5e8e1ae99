// Whether the host has the memory that Create is about to take.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/plan.h"

namespace ebb {

// Collective. `tightest`: the limit with the least room for a rank; none if the system names none.
absl::Status CheckHostMemory(const EngineInputs& inputs, const sharding::Pools& pools,
                             const HostLane& lane, std::optional<sharding::HostRoom>& tightest);

}  // namespace ebb
