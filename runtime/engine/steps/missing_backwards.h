// Which declared backwards a step left out. Such backwards come no more: their gradient is zero, or
// lacks a part. ebb.strict makes that an error of the step.
#pragma once

#include "absl/status/status.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class MissingBackwards {
 public:
  // Begins a step of this plan with this many rounds. The plan outlives the step.
  void Begin(const sharding::Plan& plan, int rounds);
  // Scopes [begin, end) of the step are left out. Calls come in the order of the scopes.
  void LeftOut(int begin, int end);
  // Names the first missing backward; OK if there is none.
  absl::Status Error() const;

 private:
  const sharding::Plan* plan_ = nullptr;
  int rounds_ = 1;
  // The first missing backward: its round from 0; unit -1: the whole round. Below: how often the
  // unit's backward was left out by then, and how often it was due.
  bool found_ = false;
  int round_ = 0, unit_ = -1, left_out_ = 0, declared_ = 0;
};

}  // namespace ebb
