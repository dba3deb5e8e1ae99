// The plans that an engine runs. The config's plans exist from the start; plans of other steps are
// made when such a step begins. All plans have the same pools.
#pragma once

#include "absl/status/statusor.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

struct EnginePlans {
  Plan step;   // of the config
  Plan walk;   // of an evaluation
  Plan drain;  // only the updates that a step has carried over
};
// The configured step's plan alone, to look at.
absl::StatusOr<Plan> PlanConfigured(const PlanInputs& inputs);
absl::StatusOr<EnginePlans> PlanEngine(const PlanInputs& inputs);

// A step of `rounds` rounds (kPlannedRounds stand for more), or a step that holds updates.
absl::StatusOr<Plan> PlanVariant(const PlanInputs& inputs, int rounds, bool hold_updates);

}  // namespace ebb::sharding
