// How many ranks sum their gradients first (ebb.reduction_group), as it is in effect.
#pragma once

#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"

namespace ebb {

// `shards`: ranks that each unit is cut over. If state is repeated, they sum first; else a group of
// the configured size, or by default the ranks of a host.
inline int ReductionGroupInEffect(const World& world, const Config& config, int shards) {
  if (shards < world.size()) return shards;
  const auto group = static_cast<int>(config.ebb.reduction_group);
  return group == 0 ? world.ranks_per_host() : group;
}

}  // namespace ebb
