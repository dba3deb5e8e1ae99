// A plan that an engine runs, linked when it is first needed: with and without updates that the step before has
// left.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/traffic.h"

namespace ebb {

struct Runnable {
  explicit Runnable(sharding::Plan of) : plan(std::move(of)) {
    const int rounds = sharding::PlannedRounds(plan);
    for (const int more : {0, 1}) {
      for (const bool carrying : {false, true})
        traffic_[more][carrying] = sharding::PredictTraffic(plan, carrying, rounds + more);
      for (int kind = 0; kind < sharding::kOperationKinds; ++kind)
        bytes_of_[more][kind] =
            plan.BytesOf(static_cast<sharding::OperationKind>(kind), rounds + more);
    }
  }

  // Predicted for a step of this many rounds. What they follow from never changes: any thread may ask.
  std::vector<TrafficRow> Traffic(bool carrying, int rounds) const {
    std::vector<TrafficRow> rows = traffic_[0][carrying];
    const auto again = static_cast<uint64_t>(rounds - sharding::PlannedRounds(plan));
    for (size_t row = 0; row < rows.size(); ++row) {
      rows[row].predicted_bytes +=
          again * (traffic_[1][carrying][row].predicted_bytes - rows[row].predicted_bytes);
    }
    return rows;
  }
  int64_t BytesOf(sharding::OperationKind kind, int rounds) const {
    const auto at = static_cast<size_t>(kind);
    return bytes_of_[0][at] +
           (rounds - sharding::PlannedRounds(plan)) * (bytes_of_[1][at] - bytes_of_[0][at]);
  }

  sharding::Plan plan;
  bool hold_updates = false;
  std::unique_ptr<LinkedFragment> linked[2];  // without, with those updates

 private:
  // Of the planned rounds, and of one in the middle more; without, with those updates; by operation kind.
  std::vector<TrafficRow> traffic_[2][2];
  int64_t bytes_of_[2][sharding::kOperationKinds] = {};
};

}  // namespace ebb
