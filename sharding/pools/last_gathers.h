// The last gather of each unit in a step, and when an early update of the unit may follow. If the
// unit's parameters are on NVMe, the gather and the update can share one read. Both share the
// masters if the gather takes a cast of masters, or the parameters if updates read those.
//
//   read     m3     m2     m1
//   gather      g3     g2     g1
//   update             u3     u2     u1       the masters of m3 are kept until u3
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "ebb/sharding/pools/reduction.h"
#include "ebb/sharding/pools/residency.h"

namespace ebb::sharding {

struct LastGather {
  int interval = -1, group = -1;  // of Residency; -1: never gathered
  // Tick of the early update, when its gradient is final. Max: none in this walk.
  int updated = std::numeric_limits<int>::max();
  // False if the interval begins in forward: it lasts too long to keep a read for its end, unless
  // its backward comes at once.
  bool may_share = false;
};

// By unit.
std::vector<LastGather> FindLastGathers(std::span<const PlannedScope> scopes,
                                        const Residency& residency, const Reduction& reduction,
                                        int units);

}  // namespace ebb::sharding
