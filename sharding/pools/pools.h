// The address of everything, by class. Permanent state comes first, end to end; then blocks that
// share memory by lifetime.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/pools/reduction.h"
#include "ebb/sharding/pools/residency.h"

namespace ebb::sharding {

// One sub-group is read while another is updated and a third is written. The next read finds a slot
// when the disk has finished the read before, even if the update or the write is late.
inline constexpr int kWorkSlots = 4;
// One group of gathers is in use while others are read.
inline constexpr int kParameterSlots = 5;

// A reduced shard is read while one is summed and one is written.
inline constexpr int kGradientSlots = 3;
// A boundary is read while one is on its way to the device, and two are written.
inline constexpr int kBoundarySlots = 4;

struct PoolInputs {
  const ModelSpec* model = nullptr;
  const ModelLayout* layout = nullptr;
  const Decisions* decisions = nullptr;
  const StatePlacement* placement = nullptr;  // null: decided near the budget
  const std::vector<PlannedScope>* scopes = nullptr;
  const Residency* residency = nullptr;
  // An evaluation's own walk: with ModelSpec::order, or secondary shards. Null: as a step begins.
  const Residency* walk = nullptr;
  const Reduction* reduction = nullptr;
  int64_t micro_batches = 1;      // of a step of the config
  int parameter_slots = 0;        // at most
  int64_t gather_slot_bytes = 0;  // at most, of parameter and master slots together
  bool fills_host = true;         // with states, where ebb.host_memory leaves room
  bool has_work_slots = true;     // also slots for masters; false: without them (LeastPools)
};

Pools LayOutPools(const PoolInputs& inputs);

// Which units share memory of the pools. A unit's whole parameters have one address, and so have
// its whole gradients; other units lie there at other times.
//
//   gather pool, prefetch_depth 0   | 0 |        prefetch_depth 1   | 0 | 1 |
//                                   | 1 |                           | 2 | 3 |
//
// Here 0 conflicts with 1 and with 2.
//
// Bytes [begin, end) of the gather pool that a unit is gathered into; the unit is not kept whole.
std::pair<int64_t, int64_t> GatherMemory(const Plan& plan, int unit);
// Whether two units cannot be gathered at once. A unit does not conflict with itself.
bool GathersConflict(const Plan& plan, int unit, int other);

}  // namespace ebb::sharding
