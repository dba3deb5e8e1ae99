#include "ebb/sharding/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "random_model.h"

namespace ebb::sharding::pool_test {
namespace {

int64_t Aligned(int64_t bytes) {
  return (bytes + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
}

constexpr int kTicks = 30;

std::vector<PoolBlock> RandomBlocks(Random& random) {
  std::vector<PoolBlock> blocks(random.Between(1, 20));
  const int64_t bytes_max = random.OneOf<int64_t>({300, 10'000});
  for (PoolBlock& block : blocks) {
    block.bytes = random.OneIn(8) ? 0 : random.Between(1, bytes_max);
    int begin = static_cast<int>(random.Between(0, kTicks / 2));
    while (begin < kTicks && !random.OneIn(4)) {
      const int end = std::min<int>(kTicks - 1, begin + static_cast<int>(random.Between(0, 8)));
      block.lifetimes.push_back({begin, end});
      begin = end + 1 + static_cast<int>(random.Between(0, 10));
    }
  }
  return blocks;
}

bool LivesAt(const PoolBlock& block, int tick) {
  return std::any_of(block.lifetimes.begin(), block.lifetimes.end(),
                     [&](const Lifetime& life) { return life.begin <= tick && tick <= life.end; });
}

TEST(Pack, NoTwoBlocksOverlapInTimeAndSpace) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<PoolBlock> blocks = RandomBlocks(random);
    const int64_t pool_bytes = Pack(blocks);
    for (int tick = 0; tick < kTicks; ++tick) {
      std::vector<std::pair<int64_t, int64_t>> live;
      for (const PoolBlock& block : blocks) {
        if (block.bytes > 0 && LivesAt(block, tick))
          live.emplace_back(block.offset, block.offset + block.bytes);
      }
      std::sort(live.begin(), live.end());
      for (size_t i = 0; i < live.size(); ++i) {
        ASSERT_EQ(live[i].first % kPoolAlignment, 0);
        ASSERT_GE(live[i].first, i == 0 ? 0 : live[i - 1].second) << "tick " << tick;
        ASSERT_LE(live[i].second, pool_bytes);
      }
    }
  }
}

TEST(Pack, NeedsAtLeastTheBlocksAliveAtOnceAndAtMostTheSum) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<PoolBlock> blocks = RandomBlocks(random);
    const int64_t pool_bytes = Pack(blocks);
    int64_t sum = 0;
    std::vector<int64_t> load(kTicks, 0);
    for (const PoolBlock& block : blocks) {
      if (!block.lifetimes.empty()) sum += Aligned(block.bytes);
      for (int tick = 0; tick < kTicks; ++tick) {
        if (LivesAt(block, tick)) load[tick] += Aligned(block.bytes);
      }
    }
    ASSERT_LE(pool_bytes, sum);
    ASSERT_GE(pool_bytes, *std::max_element(load.begin(), load.end()));
  }
}

TEST(Pack, ABlockOfTheEndsOfAStepSharesItsMemoryWithTheMiddle) {
  std::vector<PoolBlock> blocks = {{.bytes = 10'240, .lifetimes = {{0, 2}, {20, 22}}}};
  for (int i = 0; i < 8; ++i)
    blocks.push_back({.bytes = 1'024, .lifetimes = {{3 + 2 * i, 4 + 2 * i}}});
  EXPECT_EQ(Pack(blocks), 10'240);
}

TEST(Pack, BlocksThatTouchInOneTickDoNotShare) {
  std::vector<PoolBlock> blocks = {{.bytes = 256, .lifetimes = {{0, 3}}},
                                   {.bytes = 256, .lifetimes = {{3, 5}}},
                                   {.bytes = 256, .lifetimes = {{4, 6}}}};
  EXPECT_EQ(Pack(blocks), 512);
}

TEST(Pack, NoBlocksNeedNoMemory) {
  std::vector<PoolBlock> blocks = {{.bytes = 0, .lifetimes = {{0, 3}}},
                                   {.bytes = 100, .lifetimes = {}}};
  EXPECT_EQ(Pack(blocks), 0);
  EXPECT_EQ(Pack({}), 0);
}

}  // namespace
}  // namespace ebb::sharding::pool_test
