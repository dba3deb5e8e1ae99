// The plan of a step as a table for people.
#pragma once

#include <string>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// The step in a line: ranks, stage, rounds, when updates run and why.
std::string PlanHeadline(const Plan& plan);
// The headline, a legend, the columns, and a line per operation: number, time of issue, operation,
// unit, stage, stream, after what, bytes, address. A line without a number continues the one above:
// another unit of the bucket with its address, or more waits.
std::string PlanTable(const Plan& plan);

}  // namespace ebb::sharding
