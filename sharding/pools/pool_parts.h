// The parts of LayOutPools, of one concern each: pools.cc (gathers, gradients, staging),
// pools_of_state.cc (parameters, masters, optimizer states), pools_of_boundaries.cc (activations),
// pools_of_slots.cc (what passes through host memory).
#pragma once

#include <cstdint>

#include "ebb/sharding/pools/pool.h"
#include "ebb/sharding/pools/pools.h"

namespace ebb::sharding {

// Gives out addresses end to end.
class Bump {
 public:
  explicit Bump(int64_t start = 0) : end_(start) {}
  int64_t Take(int64_t bytes) {
    const int64_t at = end_;
    end_ += PoolAligned(bytes);
    return at;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

inline int64_t& Bytes(Pools& pools, StateClass state) {
  return pools.bytes[static_cast<int>(state)];
}

void LayOutParameters(const PoolInputs& in, Pools& pools);
void LayOutStates(const PoolInputs& in, Pools& pools);
void LayOutBoundaries(const PoolInputs& in, Pools& pools);
// `device`: addresses in the device's staging pool. `slice`: elements of the longest slice of a
// parameter. `norm_blocks`: blocks of the largest shard.
void LayOutSlots(const PoolInputs& in, Pools& pools, Bump& device, int64_t slice,
                 int64_t norm_blocks);

}  // namespace ebb::sharding
