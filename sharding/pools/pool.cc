#include "ebb/sharding/pools/pool.h"

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
  std::vector<size_t> placed;
  for (size_t index : order) {
    PoolBlock& block = blocks[index];
    if (block.bytes == 0 || block.lifetimes.empty()) continue;
    std::vector<size_t> neighbours;
    for (size_t other : placed) {
      if (LiveAtOnce(block, blocks[other])) neighbours.push_back(other);
    }
    std::sort(neighbours.begin(), neighbours.end(),
              [&](size_t a, size_t b) { return blocks[a].offset < blocks[b].offset; });
    int64_t offset = 0;
    for (size_t other : neighbours) {
      if (blocks[other].offset >= offset + PoolAligned(block.bytes)) break;
      offset = std::max(offset, blocks[other].offset + PoolAligned(blocks[other].bytes));
    }
    block.offset = offset;
    pool_bytes = std::max(pool_bytes, offset + PoolAligned(block.bytes));
    placed.push_back(index);
  }
  return pool_bytes;
}

}  // namespace ebb::sharding
