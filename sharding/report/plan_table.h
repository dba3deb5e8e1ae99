// The plan of a step as a text for people.
#pragma once

#include <string>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// The step in a line: ranks, stage, rounds, when updates run and why.
std::string PlanHeadline(const Plan& plan);
// The headline, a legend, and moment by moment what is issued: a line with the operation's number,
// role, stream, bytes, the arrays that it reads and writes with their places, and what it comes
// after. Lines behind it have further arrays, such as those of the other units of a bucket.
std::string PlanTable(const Plan& plan);

}  // namespace ebb::sharding
