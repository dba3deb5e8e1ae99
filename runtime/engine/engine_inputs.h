// The trainer's inputs to an engine. Create settles the rest: the world's communicators for the
// device, and the values that the config leaves open ("auto").
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
  // Inputs of the plans that the engine runs.
  sharding::PlanInputs ForPlan() const;
};

// Inputs of any plan, even one only to look at.
sharding::PlanInputs PlanInputsFor(const ModelSpec& model, const Config& config, int world,
                                   const OptimizerSpec* own_optimizer);

}  // namespace ebb
