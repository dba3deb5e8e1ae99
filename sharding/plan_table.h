// The plan of a step as a table for people.
#pragma once

#include <string>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// A line per operation: number, when it is issued, operation, units, stage, stream, after what,
// bytes, address.
std::string PlanTable(const Plan& plan);

}  // namespace ebb::sharding
