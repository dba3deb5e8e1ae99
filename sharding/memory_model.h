// Memory that a rank will hold, from the plan alone: the table that the ledger's count must equal.
#pragma once

#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

// Bytes of the buffer that holds a class's pool: whole pages.
int64_t BufferBytes(int64_t pool_bytes);

// One row for each class that the plan uses, with predicted_bytes filled in. Every rank has the
// same, because shards are equal slices.
std::vector<MemoryRow> PredictMemory(const Plan& plan);
std::vector<MemoryRow> PredictMemory(const Pools& pools);

// More bytes of host memory: state passes through these when a call asks for it, if anything is on
// NVMe or the device is a GPU.
int64_t StateStagingBytes(const Pools& pools, bool has_gpu);

// A save takes these beside the pools: the buffer of a file, and staging of its own.
inline constexpr int64_t kSaveBufferBytes = int64_t{32} << 20;
int64_t SaveBytes(const Pools& pools, bool has_gpu);

}  // namespace ebb::sharding
