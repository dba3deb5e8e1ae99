#include "ebb/sharding/passes/pool.h"

#include <algorithm>
#include <numeric>

namespace ebb::sharding {
namespace {

bool LiveAtOnce(const PoolBlock& a, const PoolBlock& b) {
  for (const Lifetime& x : a.lifetimes) {
    for (const Lifetime& y : b.lifetimes) {
      if (x.begin <= y.end && y.begin <= x.end) return true;
    }
  }
  return false;
}

}  // namespace

int64_t Pack(std::span<PoolBlock> blocks) {
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return blocks[a].bytes > blocks[b].bytes; });

  int64_t pool_bytes = 0;
  std::vector<size_t> placed;  // by offset
  const auto lies_before = [&](int64_t offset, size_t other) {
    return offset < blocks[other].offset;
  };
  for (size_t index : order) {
    PoolBlock& block = blocks[index];
    if (block.bytes == 0 || block.lifetimes.empty()) continue;
    const int64_t bytes = PoolAligned(block.bytes);
    int64_t offset = 0;
    for (size_t other : placed) {
      if (blocks[other].offset >= offset + bytes) break;
      if (LiveAtOnce(block, blocks[other]))
        offset = std::max(offset, blocks[other].offset + PoolAligned(blocks[other].bytes));
    }
    block.offset = offset;
    pool_bytes = std::max(pool_bytes, offset + bytes);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), offset, lies_before), index);
  }
  return pool_bytes;
}

}  // namespace ebb::sharding
