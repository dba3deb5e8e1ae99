// Bytes that a step moves between tiers and between ranks, from the plan alone: the tables that the
// engine's counts must equal.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

// The row of one move: the tier is the lower of the two, kRead is towards the device.
TrafficRow RowOf(const Move& move);

// A step in steady state, with the updates that the step before has carried into it, if the plan
// carries any. `carrying` false: the first step, or a step after a look at the state. Rows are in
// the order of class, tier, direction; a class that does not move has none. `rounds`: of the step,
// if the plan stands for longer ones; 0: the plan's own.
std::vector<TrafficRow> PredictTraffic(const Plan& plan, bool carrying = true, int rounds = 0);

// Bytes that a step's collectives move. `predicted` and `moved` are asked for the bytes of one role
// of operation.
using BytesOfRole = absl::FunctionRef<int64_t(Role)>;
std::vector<CommunicationRow> CommunicationRows(BytesOfRole predicted, BytesOfRole moved);
std::vector<CommunicationRow> PredictCommunication(const Plan& plan);

}  // namespace ebb::sharding
