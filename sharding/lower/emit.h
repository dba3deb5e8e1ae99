// How the operations of a plan are written, pass by pass:
//
//   PlanResidency, PlanReduction   which scopes a gather serves; which gradients share a reduction
//   PlanSwapIns                    what gathers read from the swap file, and into which slot
//   Emit                           the order of issue, and the slots that operations pass through
//   ListOf, DeriveWaits            the operations that run in a step; what each waits for
//
// Each is a pure function of the model and of the results of the passes before it.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/passes/reduction.h"
#include "ebb/sharding/passes/residency.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

enum class PlanKind : uint8_t { kStep, kWalk, kDrain };

// Inputs of the passes, which may read the plan's layout, decisions, table and scopes.
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

// Swap-ins: reads of parameters from the swap file into slots in host memory. A swap-in reads the
// parameters that one group of gathers needs. As many groups are read ahead as there are slots.
//
//   read      g0 g1 g2 | g3      g4
//   upload             g0    g1     g2        the slot of g0 is free for g3
//   gather                g0    g1     g2
//
// If a unit's update is carried over from the step before, its first visit reads nothing: the
// update writes the parameters into the slot.
//
// Early updates share the read of their unit's last gather. An update that reads parameters finds
// them in the slot, and leaves the new ones there. If an update reads masters, the masters are read
// instead of the parameters, into slots of their own, and the gather gets a cast of them.
struct SwapIn {
  std::vector<int> units;    // of one group of gathers, in the order in which they lie in the slot
  int issue = 0, round = 0;  // tick and round of those gathers
  int number = 0;            // it takes slot number % (number of slots)
  int after = -1;            // the swap-in that has this slot before; -1: none
  std::vector<int> updated;  // a carried update brings the parameters of these units
  // `shared`: units that are gathered for the last time; their updates read this slot. `behind`:
  // units that must be updated before this read.
  std::vector<int> shared = {}, behind = {};
};

struct SwapIns {
  std::vector<SwapIn> reads;  // in the order of issue
  std::vector<int> of_group;  // by group of gathers: its swap-in; -1: nothing to read
  // By unit: whether its update is carried over from the step before. `of_update`: the swap-in that
  // gives a carried update its slot, or that an early update shares (-1: none).
  std::vector<bool> carried;
  std::vector<int> of_update;
  // By sub-group: its slot number in the ring of master slots, if one read of the masters serves a
  // gather and the update; else -1.
  std::vector<int> master_slot;

  bool shares_masters(int sub_group) const { return master_slot[sub_group] >= 0; }
};

// A drain has a swap-in for each update that it runs.
SwapIns PlanSwapIns(const PassInputs& in);

// The place of element `at` of a unit's slice in the slot of `swap_in`.
Place InSlot(const Plan& plan, const SwapIn& swap_in, int unit, bool trainable, int64_t at);

class OpWriter;

// One walk over a step's scopes, which issues all operations. OpWriter::Finish puts them into the
// plan.
OpWriter Emit(const PassInputs& in, const SwapIns& swap_ins);

}  // namespace ebb::sharding
