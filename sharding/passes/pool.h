// Packs blocks with different lifetimes into one pool: two blocks share memory only if they never
// live at once. A block has one address for all its lives, so that pointers into it stay the same
// in every step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ebb/sharding/array.h"

namespace ebb::sharding {

struct PoolBlock {
  int64_t bytes = 0;
  std::vector<Lifetime> lifetimes;
  int64_t offset = 0;  // set by Pack
};

inline constexpr int64_t kPoolAlignment = 256;  // bytes
constexpr int64_t PoolAligned(int64_t bytes) {
  return (bytes + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
}

// Sets the offsets and returns the bytes of the pool. Takes the largest blocks first, and puts each
// at the lowest offset that is free during all its lives. So a large embedding at both ends of the
// step shares its memory with the blocks in between.
int64_t Pack(std::span<PoolBlock> blocks);

}  // namespace ebb::sharding
