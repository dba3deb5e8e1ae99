// The last gather of each unit in a step, and when an early update of the unit may follow. Where the
// unit's parameters are on NVMe, both can have what one of them reads: masters, of which the gather
// takes a low-precision copy, or the parameters, where updates read those.
//
//   read     m3     m2     m1
//   gather      g3     g2     g1
//   update             u3     u2     u1       what m3 has brought stays until u3 has used it
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"

namespace ebb::sharding {

struct LastGather {
  int stay = -1, group = -1;  // of Residency; -1: never gathered
  // Tick at which an early update is issued: its gradient is final. Never: not in this walk.
  int updated = std::numeric_limits<int>::max();
  // A stay that begins in forward lasts too long to keep anything for its end, unless its backward
  // comes at once.
  bool may_share = false;
};

// By unit.
std::vector<LastGather> FindLastGathers(std::span<const PlannedScope> scopes,
                                        const Residency& residency, const Reduction& reduction,
                                        int units);

}  // namespace ebb::sharding
