// The bound of a step, which no order of its operations can beat: the longest of
//
//   each resource     all of the step's work on it, at the full rate. A disk's is that of reads and
//                     writes at once, which slow down alike (ShareRates)
//   the host update   its operations, which run one after the other
//   the order         what must happen between kernels. A unit's update comes after its gradient is
//                     final, or where the step has a verdict after all gradients, and before the
//                     unit's next forward. The kernels after that, up to the gradient, take the rest
//                     of the step.
//
//   kernels   F0 F1 F2 B2 B1 B0 |..........| F0 F1 F2 B2 B1 B0
//   updates                     u0 u1 u2                          of a verdict: u0 + the kernels,
//                                                                 u0 + u1 + the kernels from F1 on, ...
//
// Gathers for kernels outside of that rest come beside the updates. Reads before, writes behind and
// gathers ahead take memory: as much as the plan's slots is counted as hidden.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/costs.h"

namespace ebb::sharding {

struct StepBound {
  std::array<double, kResources> resources = {};  // seconds
  double host_update = 0;
  // The order: its seconds, and what of an update takes longest in them (kResources: the host
  // update's operations). 0: the step has no updates.
  double order = 0;
  int order_by = 0;
  bool awaits_verdict = false;  // no update before all gradients are final

  // Those that are not 0, the longest first: "device", "disk", "host update", "order".
  std::vector<std::pair<std::string, double>> lines() const;
  double seconds() const;  // of the longest; 0: there is none
  std::string line() const;
  std::string order_word() const;  // of order_by
};

// `later`: the list of each step but the first, of the plan.
StepBound BoundOf(const Plan& plan, const OpList& later, const Costs& costs);

}  // namespace ebb::sharding
