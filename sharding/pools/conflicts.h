// Which units share memory of the pools. A unit's whole parameters have one address, and so have
// its whole gradients; other units lie there at other times.
//
//   gather pool, prefetch_depth 0   | 0 |        prefetch_depth 1   | 0 | 1 |
//                                   | 1 |                           | 2 | 3 |
//
// Here 0 conflicts with 1 and with 2.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// Bytes [begin, end) of the gather pool that a unit is gathered into; the unit is not kept whole.
std::pair<int64_t, int64_t> GatherMemory(const Plan& plan, int unit);
// Whether two units cannot be gathered at once. A unit does not conflict with itself.
bool GathersConflict(const Plan& plan, int unit, int other);

}  // namespace ebb::sharding
