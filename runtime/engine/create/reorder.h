// Replaces the order of scopes of an engine, for the same units and parameters (Engine::Reorder).
// Parameters, masters and states stay where they are. The rest is planned, laid out and linked
// again. On all ranks or on none.
//
//   agree that all ask for it, in the same order          nothing has changed
//   the old plan's pools go, the new plan's are taken     an error on any rank: the other way round
//   link
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/engine/create/engine_members.h"
#include "ebb/sharding/model.h"

namespace ebb {

class Reorder {
 public:
  explicit Reorder(EngineMembers& engine)
      : with_(engine), model_(engine.inputs.model), next_(engine.inputs, model_) {}

  // Where no step is alive.
  absl::Status To(std::vector<Visit> forward, std::vector<ScopeEvent> order);

 private:
  absl::Status Plan();
  absl::Status Change();
  // All other members use the present plans.
  absl::Status FollowPlan();

  EngineMembers& with_;
  ModelSpec model_;     // in the new order
  RunnablePlans next_;  // of that; of the old one, once they have changed places
};

}  // namespace ebb
