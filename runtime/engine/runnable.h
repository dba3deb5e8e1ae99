// A plan that an engine runs, linked when it is first needed: with and without updates that the step before has
// left.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct Runnable {
  sharding::Plan plan;
  bool hold_updates = false;
  std::unique_ptr<LinkedFragment> linked[2];         // without, with those updates
  std::vector<TrafficRow> traffic[2];                // predicted, likewise
  int64_t bytes_of[sharding::kOperationKinds] = {};  // of a step's communication, by operation kind
};

}  // namespace ebb
