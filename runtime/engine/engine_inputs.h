// The trainer's inputs to an engine. Create settles the rest: the world's communicators for the
// device, and the values that the config leaves open ("auto").
#pragma once

#include <optional>

#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct EngineInputs {
  World given_world;  // with ebb.mesh of all its ranks
  World data_world;   // the data ranks of this rank's part of the model, or all
  World world;        // these, with communicators for the device
  // All ranks that train the model, if these are more; with communicators for the device.
  std::optional<World> verdict;
  // The model is given whole, and cut over tensor ranks here (ParameterSpec::split). Calls for state
  // are then of all ranks; otherwise each part of a model makes its own.
  bool cuts_model = false;
  Device device;
  ModelSpec model;
  Config config;
  EngineOptions options;

  int rank() const { return world.rank(); }
  int size() const { return world.size(); }
  const World& of_verdict() const { return verdict.has_value() ? *verdict : world; }
  // The ranks that make calls between steps together.
  const World& of_calls() const { return cuts_model ? *verdict : world; }
  // Ranks with other blocks of the model, and this rank's number among them.
  int tensor_ranks() const { return cuts_model ? static_cast<int>(config.ebb.mesh.tensor) : 1; }
  int tensor_rank() const { return of_calls().rank() % tensor_ranks(); }
  // The rank of of_calls() with these coordinates; tensor is the innermost axis of a mesh.
  int CallRank(int data_rank, int tensor) const { return data_rank * tensor_ranks() + tensor; }
  bool uses_nccl() const { return world.connected_by_nccl(); }
  const OptimizerSpec* own_optimizer() const {
    return options.optimizer ? &*options.optimizer : nullptr;
  }
  // Inputs of the plans that the engine runs.
  sharding::PlanInputs ForPlan() const;
};

// Whether each parameter says how tensor ranks share it, where there are tensor ranks.
absl::Status CheckOverTensor(const ModelSpec& model);
// Tensor ranks have parts of matrices, which no rank can make orthogonal alone.
absl::Status CheckMatricesOverTensor(const ModelSpec& model);

// The model in units that a plan of the config takes.
ModelSpec Divided(ModelSpec model, const Config& config, const OptimizerSpec* own_optimizer);

// Inputs of any plan, even one only to look at. `world`: of all axes of the config's mesh.
sharding::PlanInputs PlanInputsFor(const ModelSpec& model, const Config& config, int world,
                                   const OptimizerSpec* own_optimizer);

}  // namespace ebb
