// What a rank will hold, from the plan alone: the table that the ledger's count must equal.
#pragma once

#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

// Bytes of the buffer that holds a class's pool: whole pages.
int64_t BufferBytes(int64_t pool_bytes);

// One row for each class that the plan uses, predicted_bytes filled in. Every rank's is the same:
// shards are equal slices.
std::vector<MemoryRow> PredictMemory(const Plan& plan);
std::vector<MemoryRow> PredictMemory(const Pools& pools);

// Of host memory beside that: what state passes through when a call asks for it, where anything is on NVMe. (On a
// GPU there always is as much.)
int64_t StateStagingBytes(const Plan& plan);

}  // namespace ebb::sharding
