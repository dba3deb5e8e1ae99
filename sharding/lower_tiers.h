// The operations of a plan: each of the logical ones, as what it takes on the tiers where things live. Slots are given
// out here, by turns; that none is needed before it is free was the logical order's concern.
#pragma once

#include <span>

#include "ebb/sharding/logical.h"
#include "ebb/sharding/plan_writer.h"

namespace ebb::sharding {

PlanWriter LowerTiers(const PassInputs& in, const ReadTurns& turns,
                      std::span<const LogicalMoment> moments);

}  // namespace ebb::sharding
