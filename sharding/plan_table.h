// The plan of a step as a table for people.
#pragma once

#include <string>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// What the step is: ranks, stage, rounds, when updates run and why. A line.
std::string PlanHeadline(const Plan& plan);
// That, a legend, the columns, and a line per operation: number, when it is issued, operation, unit, stage,
// stream, after what, bytes, address. Lines without a number go on with the operation above: another
// unit of its bucket and that unit's address, more that it comes after.
std::string PlanTable(const Plan& plan);

}  // namespace ebb::sharding
