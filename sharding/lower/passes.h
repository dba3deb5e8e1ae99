// How the operations of a plan are written, pass by pass:
//
//   PlanResidency, PlanReduction   which scopes a gather serves; which gradients share a reduction
//   PlanSwapIns                    what gathers read from the swap file, and into which slot
//   PlanLogical                    the order of issue: gather this group, update that sub-group
//   LowerTiers                     each as operations, with the slots that they pass through
//   Lower, DeriveWaits             operations that run, as instructions; what each waits for
//
// Each is a pure function of the model and of the results of the passes before it.
#pragma once

#include <cstdint>

#include "ebb/sharding/passes/reduction.h"
#include "ebb/sharding/passes/residency.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

enum class PlanKind : uint8_t { kStep, kWalk, kDrain };

// Inputs of the passes, which may read the plan's layout, decisions, pools and scopes.
struct PassInputs {
  PlanKind kind{};
  const ModelSpec& model;
  const Plan& plan;
  const Residency& residency;
  const Reduction& reduction;
  int64_t group_elements = 0;  // the most elements of units that are gathered together

  // The plan stands for a longer step. The longer step's rounds in the middle are all the same.
  bool repeats_round() const { return plan.decisions.rounds >= kPlannedRounds; }
};

}  // namespace ebb::sharding
