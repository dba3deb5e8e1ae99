// What of an engine follows from its plan: cells of memory, fragments and what issues them, and what scopes show.
#pragma once

#include "absl/status/status.h"
#include "ebb/runtime/engine/engine_parts.h"

namespace ebb {

// Once all that these parts work on is there; again for another plan, while nothing is under way. They stay at their
// addresses.
absl::Status LinkPlan(EngineParts& parts);

}  // namespace ebb
