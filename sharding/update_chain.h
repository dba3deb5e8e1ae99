// What PlanBuilder knows of an update while it writes its operations.
#pragma once

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// The operations of one unit's update.
struct UpdateChain {
  int unit = 0;
  bool carried = false;
  int turn = -1;  // of the parameter slot that carried updates fill, and shared reads have filled
  Condition condition = Condition::kAlways;
};

// The way of one sub-group: what moves to where it is updated, and through which slots.
struct SubGroupRoute {
  bool on_host = false;  // where it is updated
  bool swaps = false;    // its states, from and to the swap file
  bool moves_gradient = false, moves_parameter = false;
  bool in_parameter_slot = false;  // its parameters pass through the slot that gathers read from
  Place parameter_home = {};
  Place host_slot = {}, device_slot = {};
  Place host_parameter = {};  // on the way to or from the swap file
  Tier here() const { return on_host ? Tier::kCpu : Tier::kDevice; }
  const Place& slot() const { return on_host ? host_slot : device_slot; }
};

}  // namespace ebb::sharding
