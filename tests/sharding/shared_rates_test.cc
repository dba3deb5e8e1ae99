#include "ebb/sharding/report/shared_rates.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "random_model.h"

namespace ebb::sharding::shared_rates_test {
namespace {

using enum Resource;

Amounts Of(std::initializer_list<std::pair<Resource, double>> amounts) {
  Amounts made;
  for (const auto& [resource, amount] : amounts) made[resource] = amount;
  return made;
}

std::vector<RunningShare> Share(const Amounts& rates, const std::vector<Amounts>& demands) {
  std::vector<RunningShare> running;
  for (const Amounts& demand : demands) running.push_back({.demand = demand});
  ShareRates(rates, running);
  return running;
}

TEST(ShareRates, OneAloneRunsAtFullSpeed) {
  const auto shares = Share(Of({{kNetwork, 8}, {kCores, 2}}),
                            {Of({{kNetwork, 8}, {kCores, 1}}), Of({{kCores, 1}}), Of({})});
  for (const RunningShare& share : shares) EXPECT_EQ(share.speed, 1);
  EXPECT_EQ(shares[0].limit, static_cast<Limit>(kCores)) << "the first of those that are full";
  EXPECT_EQ(shares[1].limit, static_cast<Limit>(kCores));
  EXPECT_EQ(shares[2].limit, kNoLimit);
}

TEST(ShareRates, AFullResourceSlowsItsUsersAndLeavesTheRestToOthers) {
  const auto shares = Share(Of({{kDiskRead, 1}, {kDiskWrite, 1}, {kDisk, 1.75}}),
                            {Of({{kDiskRead, 1}, {kDisk, 1}}), Of({{kDiskRead, 1}, {kDisk, 1}}),
                             Of({{kDiskWrite, 1}, {kDisk, 1}})});
  EXPECT_EQ(shares[0].speed, 0.5);
  EXPECT_EQ(shares[1].speed, 0.5);
  EXPECT_EQ(shares[0].limit, static_cast<Limit>(kDiskRead));
  EXPECT_EQ(shares[2].speed, 0.75);
  EXPECT_EQ(shares[2].limit, static_cast<Limit>(kDisk));
}

// None is above its rate; each is as fast as alone or uses one that is full; together at least
// one's full speed.
TEST(ShareRates, NoRateIsExceededAndNoneIsLeftWhereItIsWanted) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Amounts rates;
    for (int r = 0; r < kResources; ++r)
      rates[static_cast<Resource>(r)] = static_cast<double>(random.Between(1, 1000));
    std::vector<Amounts> demands(static_cast<size_t>(random.Between(1, 12)));
    for (Amounts& demand : demands) {
      for (int r = 0; r < kResources; ++r) {
        const auto resource = static_cast<Resource>(r);
        if (random.OneIn(3))
          demand[resource] = rates[resource] * static_cast<double>(random.Between(1, 100)) / 100;
      }
    }
    const auto shares = Share(rates, demands);
    double together = 0;
    Amounts used;
    for (const RunningShare& share : shares) {
      EXPECT_GT(share.speed, 0);
      EXPECT_LE(share.speed, 1);
      together += share.speed;
      for (int r = 0; r < kResources; ++r)
        used[static_cast<Resource>(r)] += share.speed * share.demand[static_cast<Resource>(r)];
    }
    EXPECT_GE(together, 1 - 1e-9);
    for (int r = 0; r < kResources; ++r)
      EXPECT_LE(used[static_cast<Resource>(r)], rates[static_cast<Resource>(r)] * (1 + 1e-9));
    for (const RunningShare& share : shares) {
      if (share.limit == kNoLimit) {
        EXPECT_EQ(share.speed, 1);
        continue;
      }
      const auto limit = static_cast<Resource>(share.limit);
      EXPECT_GT(share.demand[limit], 0);
      EXPECT_GE(used[limit], rates[limit] * (1 - 1e-9));
    }
  }
}

}  // namespace
}  // namespace ebb::sharding::shared_rates_test
