// Which declared backwards of a step were left out. What is left out comes no more: its gradient is
// zero, or lacks a part, which ebb.strict makes an error of the step.
#pragma once

#include "absl/status/status.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class MissingBackwards {
 public:
  // A step of this plan begins, of this many rounds. The plan outlives the step.
  void Begin(const sharding::Plan& plan, int rounds);
  // Scopes [begin, end) of the step are left out. In their order, call by call.
  void LeftOut(int begin, int end);
  // The first backward that is missing; OK if none is.
  absl::Status Error() const;

 private:
  const sharding::Plan* plan_ = nullptr;
  int rounds_ = 1;
  // The first that is missing: a round from 0; unit -1: the whole of it. How often the unit's backward was
  // left out by then, of how many times.
  bool found_ = false;
  int round_ = 0, unit_ = -1, left_out_ = 0, declared_ = 0;
};

}  // namespace ebb
