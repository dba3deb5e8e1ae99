// What an engine is made of, as the trainer gave it. Create settles the rest: which communicators the world makes
// for the device, and what the config left to it ("auto").
#pragma once

#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct EngineInputs {
  World given_world;
  World world;  // with communicators for the device
  Device device;
  ModelSpec model;
  Config config;
  EngineOptions options;

  int rank() const { return world.rank(); }
  int size() const { return world.size(); }
  bool uses_nccl() const { return world.connected_by_nccl(); }
  const OptimizerSpec* own_optimizer() const {
    return options.optimizer ? &*options.optimizer : nullptr;
  }
  // Of the plans that the engine runs.
  sharding::PlanInputs ForPlan() const;
};

// Of a plan that is only looked at, too.
sharding::PlanInputs PlanInputsFor(const ModelSpec& model, const Config& config, int world,
                                   const OptimizerSpec* own_optimizer);

}  // namespace ebb
