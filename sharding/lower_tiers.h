// The operations of a plan: each of the logical ones becomes those that it takes on the tiers where things live. Slots
// are given out here, one behind the other; the logical order has seen to it that each is free by then.
#pragma once

#include <span>

#include "ebb/sharding/logical.h"
#include "ebb/sharding/plan_writer.h"

namespace ebb::sharding {

// PlanWriter::Finish puts what this has written into the plan.
PlanWriter LowerTiers(const PassInputs& in, const ReadTurns& turns,
                      std::span<const LogicalMoment> moments);

}  // namespace ebb::sharding
