// A plan that an engine runs, linked when it is first needed: with and without updates that the
// step before has left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/issue/moved_bytes.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/report/traffic.h"

namespace ebb {

struct Runnable {
  explicit Runnable(sharding::Plan of) : plan(std::move(of)) {
    const int rounds = sharding::PlannedRounds(plan);
    for (const int more : {0, 1}) {
      for (const bool carrying : {false, true})
        traffic_[more][carrying] = sharding::PredictTraffic(plan, carrying, rounds + more);
      for (int role = 0; role < sharding::kRoles; ++role)
        bytes_of_[more][role] = plan.BytesOf(static_cast<sharding::Role>(role), rounds + more);
    }
  }

  // For a step of this many rounds that begins.
  void Predict(bool carrying, int rounds, MovedBytes& moved) const {
    moved.Clear();
    const int64_t again = rounds - sharding::PlannedRounds(plan);
    const auto of_rounds = [&](int64_t planned, int64_t one_more) {
      return planned + again * (one_more - planned);
    };
    for (size_t row = 0; row < traffic_[0][carrying].size(); ++row) {
      const TrafficRow &planned = traffic_[0][carrying][row], &more = traffic_[1][carrying][row];
      moved.Predict(planned, of_rounds(static_cast<int64_t>(planned.predicted_bytes),
                                       static_cast<int64_t>(more.predicted_bytes)));
    }
    for (size_t role = 0; role < std::size(bytes_of_[0]); ++role)
      moved.Predict(static_cast<sharding::Role>(role),
                    of_rounds(bytes_of_[0][role], bytes_of_[1][role]));
  }

  sharding::Plan plan;
  bool hold_updates = false;
  std::unique_ptr<LinkedList> linked[2];  // without, with those updates

 private:
  // Traffic of the planned rounds [0], and with one middle round more [1]; without [0] and with [1]
  // carried updates.
  std::vector<TrafficRow> traffic_[2][2];
  // Bytes of the same steps by role.
  int64_t bytes_of_[2][sharding::kRoles] = {};
};

}  // namespace ebb
