// Lays the pools out so that they stay within what the config grants: ebb.device_memory,
// ebb.host_memory and DeepSpeed's pool sizes, which are upper limits. What host_memory leaves is
// used for states that would else be on NVMe.
#pragma once

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/pools.h"

namespace ebb::sharding {

// Homes and parameter_slots of `inputs` are chosen here. Errors say which class needs how much and
// what would fit.
absl::StatusOr<Pools> LayOutWithinBudget(PoolInputs inputs, const Config& config);

}  // namespace ebb::sharding
