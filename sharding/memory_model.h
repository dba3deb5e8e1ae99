// Memory that a rank will hold, from the plan alone: the table that the ledger's count must equal.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

// Bytes of the buffer that holds a class's pool: whole pages.
int64_t BufferBytes(int64_t pool_bytes);

// One row for each class that has any bytes, with predicted_bytes filled in.
std::vector<MemoryRow> PredictMemory(const PoolBytes& pools);

// More bytes of host memory: state passes through these when a call asks for it, if anything is on
// NVMe or the device is a GPU.
int64_t StateStagingBytes(const PoolBytes& pools, bool has_gpu);

// A save takes these beside the pools: the buffer of a file, and staging of its own.
inline constexpr int64_t kSaveBufferBytes = int64_t{32} << 20;
int64_t SaveBytes(const PoolBytes& pools, bool has_gpu);

// The bytes of a tier that are in use at each operation: written before and read again later.
// Pools hold memory all the time. These numbers show the operation at which most of it is in use,
// by class.
//
//   a gathered unit      gather |=====| its last kernels     its slot then holds another unit
//   a master             |===========================|       in use since the step before, if a
//                                                            step reads it and has not written it
using ClassBytes = std::array<int64_t, kStateClasses>;

// By operation of a step between others like it, on the rank that has the first slices. The
// workspace does not count, because no operation names it.
std::vector<ClassBytes> AliveBytes(const OpList& list, Tier tier);

}  // namespace ebb::sharding
