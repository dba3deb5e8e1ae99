// What a step moves between tiers, from the plan alone: the table that the engine's count must equal.
#pragma once

#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

// The row of one move: the tier is the lower of the two, kRead is towards the device.
TrafficRow RowOf(const Move& move);

// A step in steady state: with the updates that the step before carried into it, if the plan carries
// any; `carrying` false: the first step, or one after a look at the state. Rows in the order of
// class, tier, direction; none of what does not move.
std::vector<TrafficRow> PredictTraffic(const Plan& plan, bool carrying = true);

}  // namespace ebb::sharding
