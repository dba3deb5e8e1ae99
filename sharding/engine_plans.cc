#include "ebb/sharding/engine_plans.h"

#include <algorithm>

#include "ebb/runtime/config/status_macros.h"

namespace ebb::sharding {

absl::StatusOr<Plan> PlanConfigured(const PlanInputs& inputs) {
  return PlanStep(inputs);
}

absl::StatusOr<EnginePlans> PlanEngine(const PlanInputs& inputs) {
  EnginePlans plans;
  EBB_ASSIGN_OR_RETURN(plans.step, PlanConfigured(inputs));
  EBB_ASSIGN_OR_RETURN(plans.walk, PlanWalk(inputs));
  EBB_ASSIGN_OR_RETURN(plans.drain, PlanDrain(inputs));
  return plans;
}

absl::StatusOr<Plan> PlanVariant(const PlanInputs& inputs, int rounds, bool hold_updates) {
  return PlanStep(inputs, std::min(rounds, kPlannedRounds), hold_updates);
}

}  // namespace ebb::sharding
