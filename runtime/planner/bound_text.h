// The bound of a step (sharding/report/bound.h) as text.
#pragma once

#include <string>

#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

// The bound by line, the longest first, and what the simulated step takes of it; "": it has no time.
std::string BoundText(const Answer& answer);

}  // namespace ebb::planner
