#include "ebb/sharding/latest_use.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "random_model.h"

namespace ebb::sharding {
namespace {

TEST(LatestUse, IsOfTheBytesAskedFor) {
  LatestUse pool;
  EXPECT_EQ(pool.Latest(0, 100), -1);
  pool.Use(0, 8, 1);
  pool.Use(4, 6, 3);
  pool.Use(20, 30, 4);
  EXPECT_EQ(pool.Latest(0, 4), 1);
  EXPECT_EQ(pool.Latest(0, 5), 3);
  EXPECT_EQ(pool.Latest(6, 8), 1);
  EXPECT_EQ(pool.Latest(8, 20), -1);
  EXPECT_EQ(pool.Latest(7, 21), 4);
  EXPECT_EQ(pool.Latest(5, 5), -1) << "no bytes";
  pool.Use(5, 5, 6);
  EXPECT_EQ(pool.Latest(0, 8), 3) << "used with no bytes";
}

TEST(LatestUse, IsThatOfTheBytesOneByOne) {
  constexpr int64_t kBytes = 60;
  for (int seed = 1; seed <= Cases(50); ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<uint64_t>(seed));
    LatestUse pool;
    std::vector<int> bytes(kBytes, -1);
    int use = 0;
    for (int n = 0; n < 100; ++n) {
      const int64_t begin = random.Between(0, kBytes), end = random.Between(begin, kBytes);
      int expected = -1;
      for (int64_t i = begin; i < end; ++i) expected = std::max(expected, bytes[i]);
      ASSERT_EQ(pool.Latest(begin, end), expected) << begin << " to " << end;
      const int64_t from = random.Between(0, kBytes), to = random.Between(from, kBytes);
      use += static_cast<int>(random.Between(1, 3));
      pool.Use(from, to, use);
      std::fill(bytes.begin() + from, bytes.begin() + to, use);
    }
  }
}

}  // namespace
}  // namespace ebb::sharding
