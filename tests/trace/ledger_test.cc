// The memory ledger: charges, peaks and rows, also from many threads.
#include "ebb/runtime/trace/ledger.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

namespace ebb::ledger_test {
namespace {

using Charge = MemoryLedger::Charge;

void ExpectRow(const MemoryRow& row, StateClass state, Tier tier, uint64_t predicted,
               uint64_t current, uint64_t peak) {
  EXPECT_EQ(row.state, state);
  EXPECT_EQ(row.tier, tier);
  EXPECT_EQ(row.predicted_bytes, predicted);
  EXPECT_EQ(row.current_bytes, current);
  EXPECT_EQ(row.peak_bytes, peak);
}

TEST(MemoryLedger, StartsWithoutRows) {
  EXPECT_TRUE(MemoryLedger().Rows().empty());
}

TEST(MemoryLedger, CountsPresentAndPeakBytes) {
  MemoryLedger ledger;
  const Charge kept(ledger, StateClass::kMaster, Tier::kCpu, 10);
  { const Charge passing(ledger, StateClass::kMaster, Tier::kCpu, 100); }
  const Charge later(ledger, StateClass::kMaster, Tier::kCpu, 5);
  const std::vector<MemoryRow> rows = ledger.Rows();
  ASSERT_EQ(rows.size(), 1u);
  ExpectRow(rows[0], StateClass::kMaster, Tier::kCpu, 0, 15, 110);
}

TEST(MemoryLedger, ListsPredictionsAndPeaksByClassThenTier) {
  MemoryLedger ledger;
  ledger.Predict(StateClass::kWorkspace, Tier::kDevice, 7);
  ledger.Predict(StateClass::kGather, Tier::kNvme, 20);
  ledger.Predict(StateClass::kGather, Tier::kNvme, 1);
  { const Charge gone(ledger, StateClass::kGather, Tier::kDevice, 3); }
  const Charge empty(ledger, StateClass::kStaging, Tier::kDevice, 0);
  const std::vector<MemoryRow> rows = ledger.Rows();
  ASSERT_EQ(rows.size(), 3u);
  ExpectRow(rows[0], StateClass::kGather, Tier::kDevice, 0, 0, 3);
  ExpectRow(rows[1], StateClass::kGather, Tier::kNvme, 21, 0, 0);
  ExpectRow(rows[2], StateClass::kWorkspace, Tier::kDevice, 7, 0, 0);
}

TEST(MemoryLedger, ChargesMoveWithoutCountingTwice) {
  MemoryLedger ledger;
  const auto current = [&] { return ledger.Rows().at(0).current_bytes; };
  Charge first(ledger, StateClass::kGradient, Tier::kDevice, 8);
  Charge second(std::move(first));
  EXPECT_EQ(current(), 8u);
  Charge third(ledger, StateClass::kGradient, Tier::kDevice, 32);
  EXPECT_EQ(current(), 40u);
  third = std::move(second);  // releases its own
  EXPECT_EQ(current(), 8u);
  Charge& same = third;
  third = std::move(same);
  EXPECT_EQ(current(), 8u);
  third = Charge();
  EXPECT_EQ(current(), 0u);
  EXPECT_EQ(ledger.Rows().at(0).peak_bytes, 40u);
}

TEST(MemoryLedger, BalancesOverThreads) {
  constexpr int kThreads = 4, kTimes = 2000;
  MemoryLedger ledger;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      const Charge kept(ledger, StateClass::kGather, Tier::kDevice, 1000);
      for (int i = 0; i < kTimes; ++i) {
        const Charge passing(ledger, StateClass::kGather, Tier::kDevice, 1);
        ledger.Predict(StateClass::kGather, Tier::kDevice, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const MemoryRow row = ledger.Rows().at(0);
  EXPECT_EQ(row.current_bytes, 0u);
  EXPECT_EQ(row.predicted_bytes, uint64_t{kThreads} * kTimes);
  EXPECT_GE(row.peak_bytes, 1001u);  // by one thread alone
  EXPECT_LE(row.peak_bytes, 1001u * kThreads);
}

}  // namespace
}  // namespace ebb::ledger_test
