// How the operations of a plan are written, pass by pass:
//
//   PlanResidency, PlanReduction   which scopes a gather serves; which gradients share a reduction
//   PlanSwapIns                    what gathers read from the swap file, and into which slot
//   Emit                           the order of issue, and the slots that operations pass through
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

class PlanWriter;
struct SwapIns;

// One walk over a step's scopes, which issues all operations. PlanWriter::Finish puts them into the
// plan.
PlanWriter Emit(const PassInputs& in, const SwapIns& swap_ins);

}  // namespace ebb::sharding
