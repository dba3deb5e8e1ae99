// The plans that an engine runs: those of its config, which it has from the start, and those of steps that are begun
// otherwise. All have the same pools.
#pragma once

#include "absl/status/statusor.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

struct EnginePlans {
  Plan step;   // of the config
  Plan walk;   // of an evaluation
  Plan drain;  // the updates that a step has left, alone
};
// Its first alone, to be looked at.
absl::StatusOr<Plan> PlanConfigured(const PlanInputs& inputs);
absl::StatusOr<EnginePlans> PlanEngine(const PlanInputs& inputs);

// A step of so many rounds, of which kPlannedRounds stand for more; or that holds its updates until Finish.
absl::StatusOr<Plan> PlanVariant(const PlanInputs& inputs, int rounds, bool hold_updates);

}  // namespace ebb::sharding
