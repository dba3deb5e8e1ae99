// The parts of an engine that are made again when its plan changes: cells of memory, fragments with the order of their
// streams, and what scopes show.
#pragma once

#include "absl/status/status.h"
#include "ebb/runtime/engine/engine_parts.h"

namespace ebb {

// Once all that these parts work on is there; again for another plan, while nothing is under way. They stay at their
// addresses.
absl::Status LinkPlan(EngineParts& parts);

}  // namespace ebb
