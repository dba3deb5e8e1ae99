// The address of everything, by class: permanent state first laid end to end, then what shares
// memory by lifetime.
#pragma once

#include "ebb/sharding/plan.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"

namespace ebb::sharding {

struct PoolInputs {
  const ModelSpec* model = nullptr;
  const ModelLayout* layout = nullptr;
  const Decisions* decisions = nullptr;
  const std::vector<PlannedScope>* scopes = nullptr;
  const Residency* residency = nullptr;
  const Reduction* reduction = nullptr;
  int64_t micro_batches = 1;  // of a step of the config
};

Pools LayOutPools(const PoolInputs& inputs);

}  // namespace ebb::sharding
