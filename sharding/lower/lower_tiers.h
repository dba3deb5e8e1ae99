// Lowers the logical operations of a plan to operations on the tiers that hold the data. Slots are
// given out here, one behind the other; the logical order has seen to it that each is free by then.
#pragma once

#include <span>

#include "ebb/sharding/lower/logical.h"
#include "ebb/sharding/lower/plan_writer.h"

namespace ebb::sharding {

// PlanWriter::Finish puts the operations into the plan.
PlanWriter LowerTiers(const PassInputs& in, const SwapIns& swap_ins,
                      std::span<const LogicalMoment> moments);

}  // namespace ebb::sharding
