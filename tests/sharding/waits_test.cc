// Waits that are derived from what operations touch. plan_test checks that the waits are enough.
// Here none is too many: whichever is taken away, the replay misses it.
#include "ebb/sharding/waits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "random_model.h"
#include "replay.h"
#include "tests/status.h"

namespace ebb::sharding::waits_test {
namespace {

// Operations by hand.

struct Written {
  StreamId stream{};
  std::vector<Operand> operands;
  bool carried = false;
};

Operand OnDevice(Access access, int64_t begin, int64_t bytes, int64_t per_slice = 0) {
  return {.place = {.pool = StateClass::kGather, .offset = begin, .per_slice = per_slice},
          .access = access,
          .count = bytes};
}

Operand Control(Access access, int64_t cell) {
  return {.place = {.tier = Tier::kCpu, .pool = StateClass::kControl, .offset = cell},
          .access = access,
          .count = 1};
}

constexpr int kUnits = 2, kSlices = 4, kSecondarySlices = 2;

OpList ListWith(std::initializer_list<Written> ops, std::vector<int> round_begins = {}) {
  OpList list{.round_begins = std::move(round_begins)};
  const auto memory = std::make_shared<OpMemory>();
  list.memory = memory;
  for (const Written& each : ops) {
    Op op{.role = Role::kUpload,
          .stream = each.stream,
          .starts = LineOf(each.stream),
          .ends = EndOf(each.stream),
          .when = each.carried ? When::kCarrying : When::kAlways,
          .operands = memory->operands.Keep(each.operands)};
    for (const Operand& operand : each.operands) {
      op.by_parity |= operand.place.pool == StateClass::kControl &&
                      ControlCells(kUnits).by_parity(operand.place.offset);
    }
    list.ops.push_back(op);
  }
  const OpList* const only[] = {&list};
  DeriveWaits(Cells(only, kUnits, kSlices, kSecondarySlices), list);
  return list;
}

std::vector<int> WaitsOf(const OpList& list, size_t op) {
  const std::span<const int> waits = list.waits[op].on;
  return {waits.begin(), waits.end()};
}

using Numbers = std::vector<int>;

TEST(DeriveWaits, OperationsInConflictAreOrdered) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                {StreamId::kGather, {OnDevice(Access::kRead, 32, 64)}},
                                {StreamId::kReduce, {OnDevice(Access::kRead, 64, 64)}},
                                {StreamId::kCompute, {OnDevice(Access::kRead, 0, 16)}},
                                {StreamId::kUpdate, {OnDevice(Access::kWrite, 48, 32)}}});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{0});
  EXPECT_EQ(WaitsOf(list, 2), Numbers{});
  EXPECT_EQ(WaitsOf(list, 3), Numbers{0});
  EXPECT_EQ(WaitsOf(list, 4), (Numbers{2, 1})) << "the first comes before the second";
}

TEST(DeriveWaits, ATransferWaitsForTheOneBeforeItWhereBothUseTheMemory) {
  const OpList list = ListWith({{StreamId::kReadStates, {OnDevice(Access::kWrite, 0, 64)}},
                                {StreamId::kReadStates, {OnDevice(Access::kWrite, 64, 64)}},
                                {StreamId::kReadStates, {OnDevice(Access::kWrite, 0, 64)}},
                                {StreamId::kUpdate, {OnDevice(Access::kRead, 0, 128)}}});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{});
  EXPECT_EQ(WaitsOf(list, 2), Numbers{0});
  EXPECT_EQ(WaitsOf(list, 3), Numbers{2}) << "the second ends before the third";
}

// Ranks lie at different places of one section; parts of a slice stay apart on all of them.
TEST(DeriveWaits, SlicesCountAsThoseOfAllRanks) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 32, 64)}},
                                {StreamId::kDownload, {OnDevice(Access::kRead, 32, 32, 64)}},
                                {StreamId::kUpdate, {OnDevice(Access::kRead, 0, 16, 64)}},
                                {StreamId::kCompute, {OnDevice(Access::kRead, 192, 16)}},
                                {StreamId::kGather, {OnDevice(Access::kWrite, 0, 64 * kSlices)}}});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{}) << "another part of the slice";
  EXPECT_EQ(WaitsOf(list, 2), Numbers{0});
  EXPECT_EQ(WaitsOf(list, 3), Numbers{0}) << "the last rank's";
  EXPECT_EQ(WaitsOf(list, 4), (Numbers{3, 2, 1}));
}

// Two ranks cut a secondary copy, so that it ends behind the second part.
TEST(DeriveWaits, PartsOfASecondaryCopyCountAsThoseOfItsRanks) {
  Operand part = OnDevice(Access::kRead, 0, 64, 64);
  part.place.of_secondary = true;
  const OpList list = ListWith({{StreamId::kGather, {part}},
                                {StreamId::kUpload, {OnDevice(Access::kWrite, 64, 64)}},
                                {StreamId::kReduce, {OnDevice(Access::kWrite, 128, 64)}}});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{0}) << "the second rank's";
  EXPECT_EQ(WaitsOf(list, 2), Numbers{});
}

TEST(DeriveWaits, SectionsThatShareMemoryConflictWhole) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 32, 64)}},
                                {StreamId::kDownload, {OnDevice(Access::kWrite, 48, 16, 128)}}});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{0});
}

// A step of other rounds uses slots that no list has which memory was cut by.
TEST(Cells, BytesThatNoListTouchesHaveCells) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 64, 64)}}});
  const OpList* const only[] = {&list};
  const Cells cells(only, kUnits, kSlices, kSecondarySlices);
  std::vector<CellRange> touched, before, behind;
  cells.Find(OnDevice(Access::kRead, 64, 64), touched);
  cells.Find(OnDevice(Access::kRead, 0, 32), before);
  cells.Find(OnDevice(Access::kRead, 4096, 32), behind);
  ASSERT_EQ(touched.size(), 1u);
  ASSERT_EQ(before.size(), 1u);
  ASSERT_EQ(behind.size(), 1u);
  EXPECT_EQ(before[0].second, touched[0].first);
  EXPECT_EQ(touched[0].second, behind[0].first);
  Operand elsewhere = OnDevice(Access::kRead, 0, 32);
  elsewhere.place.pool = StateClass::kSecondary;
  std::vector<CellRange> of_other_pool;
  cells.Find(elsewhere, of_other_pool);
  EXPECT_FALSE(of_other_pool.empty()) << "a pool that the list does not touch";
}

// The slices that were cut by are parts of longer ones.
TEST(Cells, BytesOfASliceAfterTheLastCutHaveCells) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 16, 64)}},
                                {StreamId::kDownload, {OnDevice(Access::kWrite, 16, 16, 64)}}});
  const OpList* const only[] = {&list};
  const Cells cells(only, kUnits, kSlices, kSecondarySlices);
  const auto find = [&](const Operand& operand) {
    std::vector<CellRange> ranges;
    cells.Find(operand, ranges);
    std::set<int> found;
    for (const auto& [begin, end] : ranges)
      for (int cell = begin; cell < end; ++cell) found.insert(cell);
    return found;
  };
  const std::set<int> behind = find(OnDevice(Access::kRead, 32, 32, 64)),
                      over_the_end = find(OnDevice(Access::kRead, 16, 32, 64)),
                      last = find(OnDevice(Access::kRead, 64 * kSlices - 16, 16));
  EXPECT_FALSE(behind.empty());
  for (const int cell : last) {  // of the last rank
    EXPECT_TRUE(behind.contains(cell));
  }
  for (const int cell : find(OnDevice(Access::kRead, 16, 16, 64)))
    EXPECT_TRUE(over_the_end.contains(cell));
  for (const int cell : find(OnDevice(Access::kRead, 64 * (kSlices - 1) + 40, 8)))
    EXPECT_TRUE(over_the_end.contains(cell));
}

TEST(DeriveWaits, CarriedOperationsBelongToTheOtherParity) {
  const int64_t constants = ControlCells(kUnits).constants();
  const OpList list =
      ListWith({{StreamId::kUpdate, {Control(Access::kRead, constants)}, /*carried=*/true},
                {StreamId::kReduce, {Control(Access::kWrite, constants)}},
                {StreamId::kHostUpdate, {Control(Access::kRead, constants)}}});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{}) << "of the next step";
  EXPECT_EQ(WaitsOf(list, 2), Numbers{1});
}

// Through the frontier, whichever list ran before.

class Runs {
 public:
  // The earlier operations that each operation waits for, as numbers over all runs.
  std::vector<std::vector<int>> Run(const OpList& list, int parity) {
    std::vector<std::vector<int>> all;
    std::vector<int> events;
    for (size_t index = 0; index < list.ops.size(); ++index) {
      const Op& each = list.ops[index];
      const Waits& of = list.waits[index];
      std::vector<int> waits;
      for (int wait : of.on) frontier_.Follow(each.starts, events[static_cast<size_t>(wait)]);
      frontier_.Enter(each.starts, of.enters, parity,
                      [&](int event) { waits.push_back(number_[static_cast<size_t>(event)]); });
      const int event = frontier_.AddEvent(each.ends);
      number_.push_back(issued_++);
      events.push_back(event);
      frontier_.Issue(each.starts, each.ends, event);
      frontier_.Leave(of.leaves, parity, event);
      all.push_back(std::move(waits));
    }
    return all;
  }
  void Clear() { frontier_.Clear(); }

 private:
  Frontier frontier_{64};
  std::vector<int> number_;  // by event
  int issued_ = 0;
};

TEST(Frontier, TheFirstUsesOfAListWaitForTheLastOfThoseBeforeIt) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                {StreamId::kGather, {OnDevice(Access::kRead, 0, 64)}},
                                {StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}}});
  Runs runs;
  EXPECT_EQ(runs.Run(list, 0), (std::vector<Numbers>{{}, {}, {}}));
  EXPECT_EQ(runs.Run(list, 1)[0], (Numbers{2, 1})) << "both that read";
  runs.Clear();
  EXPECT_EQ(runs.Run(list, 0)[0], Numbers{});
}

// So the operations between two of round_begins may run again.
TEST(Frontier, WaitsAreFoundBetweenListsToo) {
  const OpList list = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                {StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}},
                                {StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                {StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}}},
                               /*round_begins=*/{2});
  EXPECT_EQ(WaitsOf(list, 1), Numbers{0});
  EXPECT_EQ(WaitsOf(list, 2), Numbers{});
  EXPECT_EQ(WaitsOf(list, 3), Numbers{2});
  EXPECT_EQ(Runs().Run(list, 0)[2], Numbers{1});
}

TEST(Frontier, NothingIsWaitedForTwice) {
  const OpList write = ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}}}),
               read = ListWith({{StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}}});
  Runs runs;
  runs.Run(write, 0);
  EXPECT_EQ(runs.Run(read, 0)[0], Numbers{0});
  EXPECT_EQ(runs.Run(read, 0)[0], Numbers{}) << "the stream is behind the write already";
}

TEST(Frontier, AUseReplacesEarlierUsesThatItWaitedFor) {
  const OpList before =
                   ListWith({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                             {StreamId::kGather,
                              {OnDevice(Access::kRead, 0, 64), OnDevice(Access::kWrite, 64, 64)}}}),
               after = ListWith({{StreamId::kCompute, {OnDevice(Access::kRead, 0, 128)}}});
  const OpList* const both[] = {&before, &after};
  const Cells cells(both, kUnits, kSlices, kSecondarySlices);
  OpList first = before, second = after;
  for (OpList* list : {&first, &second}) DeriveWaits(cells, *list);
  Runs runs;
  runs.Run(first, 0);
  EXPECT_EQ(runs.Run(second, 0)[0], Numbers{1}) << "the gather has waited for the upload";
}

TEST(Frontier, StepsOfOneParityMeetAgain) {
  const int64_t constants = ControlCells(kUnits).constants();
  const OpList list = ListWith({{StreamId::kReduce, {Control(Access::kWrite, constants)}},
                                {StreamId::kUpdate, {Control(Access::kRead, constants)}}});
  Runs runs;
  runs.Run(list, 0);
  EXPECT_EQ(runs.Run(list, 1)[0], Numbers{});
  EXPECT_EQ(runs.Run(list, 0)[0], Numbers{1}) << "the update of the step before the last";
}

}  // namespace
}  // namespace ebb::sharding::waits_test
