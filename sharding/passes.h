// How the operations of a plan are written, pass by pass:
//
//   PlanResidency, PlanReduction   which scopes a gather serves; which gradients are reduced together
//   PlanReadTurns                  what gathers read from the swap file, and in which slot it waits for them
//   PlanLogical                    in which order all is issued: gather this group, update that sub-group
//   LowerTiers                     each of these as operations, with what passes through slots between tiers
//   Lower, DeriveWaits             the operations that run, as instructions; what each of those waits for
//
// Each is a pure function of the model and of what those before it have made.
#pragma once

#include <cstdint>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"

namespace ebb::sharding {

enum class PlanKind : uint8_t { kStep, kWalk, kDrain };

// What the passes read. Of the plan they may read its layout, decisions, pools and scopes.
struct PassInputs {
  PlanKind kind{};
  const ModelSpec& model;
  const Plan& plan;
  const Residency& residency;
  const Reduction& reduction;
  int64_t group_elements = 0;  // of units that are gathered together

  // The plan stands for a longer step. Its rounds in the middle are all the same.
  bool repeats_round() const { return plan.decisions.rounds >= kPlannedRounds; }
};

}  // namespace ebb::sharding
