// One side of CopyParametersFrom: a model, cut and kept in some way, and steps that train it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/ebb.h"
#include "tests/engine/scripted.h"

namespace ebb::testing {

// The scripted model's parameters in the reverse order, in other units, none of them trainable.
ModelSpec Served();
// The scripted model with everything trainable that is frozen there, and the reverse.
ModelSpec Inverted();

struct Side {
  ModelSpec model;
  Setting setting;
  DType dtype = DType::kFloat32;
  int64_t shard_group = 0;
  bool suspended = false;
  int64_t persistent = 0;

  Config config() const {
    Config config = ConfigFor(setting);
    config.compute = dtype;
    config.ebb.shard_group = shard_group;
    config.zero.param_persistence_threshold = persistent;
    return config;
  }
  absl::StatusOr<Engine> Create(const World& world, std::string name) const {
    return Engine::Create(world, Device::Cpu(1), model, config(), {.name = std::move(name)});
  }
};

// One step with exact gradients, for all trainable parameters.
absl::Status Train(Engine& engine, const ModelSpec& model, int rank);

}  // namespace ebb::testing
