// The rows of a table, in one fixed order, from what has been decided, and their places. First what
// stays from step to step, then what shares memory by lifetime, then what operations hand on.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/decisions.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/passes/reduction.h"
#include "ebb/sharding/passes/residency.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/scopes.h"
#include "ebb/sharding/table.h"

namespace ebb::sharding {

// One sub-group is read while another is updated and a third is written. The next read finds a slot
// when the disk has finished the read before, even if the update or the write is late.
inline constexpr int kWorkSlots = 4;
// Units whose matrices are on their way at once.
inline constexpr int kMatrixTurns = 2;
// One group of gathers is in use while others are read.
inline constexpr int kParameterSlots = 5;
// A reduced shard is read while one is summed and one is written.
inline constexpr int kGradientSlots = 3;
// A boundary is read while one is on its way to the device, and two are written.
inline constexpr int kOutputSlots = 4;

struct RowInputs {
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
  bool has_work_slots = true;     // also slots for masters; false: without them (LeastTable)
};

// Every array that a step, an evaluation or a call may touch, without places.
Table RowsOf(const RowInputs& inputs);

// The parts of RowsOf: state_rows.cc, shared_rows.cc, staging_rows.cc.
void AddStateRows(const RowInputs& in, Table& table);
void AddSharedRows(const RowInputs& in, Table& table);
void AddStagingRows(const RowInputs& in, Table& table);

// Fills in the places of all extents, and the bytes of the pools. Reads the rows alone: in each pool
// first the arrays that share memory by lifetime, then the others, end to end.
void Allocate(Table& table);

// The placement that a table was made of.
StatePlacement PlacementOf(const Table& table);

}  // namespace ebb::sharding
