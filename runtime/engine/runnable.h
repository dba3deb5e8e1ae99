// A plan that an engine runs, linked when it is first needed: with and without updates that the step before has
// left.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/traffic.h"

namespace ebb {

struct Runnable {
  explicit Runnable(sharding::Plan of) : plan(std::move(of)) {
    for (const bool carrying : {false, true})
      traffic[carrying] = sharding::PredictTraffic(plan, carrying);
    for (int kind = 0; kind < sharding::kOperationKinds; ++kind)
      bytes_of[kind] = plan.BytesOf(static_cast<sharding::OperationKind>(kind));
  }

  sharding::Plan plan;
  bool hold_updates = false;
  std::unique_ptr<LinkedFragment> linked[2];  // without, with those updates
  // Predicted, and never changed: any thread may ask for them.
  std::vector<TrafficRow> traffic[2];                // without, with those updates
  int64_t bytes_of[sharding::kOperationKinds] = {};  // of a step's communication, by operation kind
};

}  // namespace ebb
