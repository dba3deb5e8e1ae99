// Waits that are derived from what instructions touch. plan_test checks that the waits are enough.
// Here none is too many: whichever is taken away, the replay misses it.
#include "ebb/sharding/waits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <set>
#include <utility>
#include <vector>

#include "random_model.h"
#include "replay.h"
#include "tests/status.h"

namespace ebb::sharding::waits_test {
namespace {

// Instructions by hand.

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

Fragment FragmentOf(std::initializer_list<Written> instructions,
                    std::vector<int> round_begins = {}) {
  Fragment fragment;
  fragment.round_begins = std::move(round_begins);
  for (const Written& each : instructions) {
    Instruction instruction{.code = Code::kCopy,
                            .role = OperationKind::kUpload,
                            .stream = each.stream,
                            .starts = LineOf(each.stream),
                            .ends = EndOf(each.stream),
                            .carried = each.carried};
    for (const Operand& operand : each.operands) {
      instruction.by_parity |= operand.place.pool == StateClass::kControl &&
                               ControlCells(kUnits).by_parity(operand.place.offset);
    }
    instruction.operands = fragment.lists->operands.Keep(each.operands);
    fragment.instructions.push_back(instruction);
  }
  const Fragment* const only[] = {&fragment};
  DeriveWaits(Cells(only, kUnits, kSlices, kSecondarySlices), fragment);
  return fragment;
}

std::vector<int> WaitsOf(const Fragment& fragment, size_t instruction) {
  const std::span<const int> waits = fragment.instructions[instruction].waits;
  return {waits.begin(), waits.end()};
}

using Waits = std::vector<int>;

TEST(DeriveWaits, InstructionsInConflictAreOrdered) {
  const Fragment fragment = FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                        {StreamId::kGather, {OnDevice(Access::kRead, 32, 64)}},
                                        {StreamId::kReduce, {OnDevice(Access::kRead, 64, 64)}},
                                        {StreamId::kCompute, {OnDevice(Access::kRead, 0, 16)}},
                                        {StreamId::kUpdate, {OnDevice(Access::kWrite, 48, 32)}}});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{0});
  EXPECT_EQ(WaitsOf(fragment, 2), Waits{});
  EXPECT_EQ(WaitsOf(fragment, 3), Waits{0});
  EXPECT_EQ(WaitsOf(fragment, 4), (Waits{2, 1})) << "the first comes before the second";
}

TEST(DeriveWaits, ATransferWaitsForTheOneBeforeItWhereBothUseTheMemory) {
  const Fragment fragment = FragmentOf({{StreamId::kReadStates, {OnDevice(Access::kWrite, 0, 64)}},
                                        {StreamId::kReadStates, {OnDevice(Access::kWrite, 64, 64)}},
                                        {StreamId::kReadStates, {OnDevice(Access::kWrite, 0, 64)}},
                                        {StreamId::kUpdate, {OnDevice(Access::kRead, 0, 128)}}});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{});
  EXPECT_EQ(WaitsOf(fragment, 2), Waits{0});
  EXPECT_EQ(WaitsOf(fragment, 3), Waits{2}) << "the second ends before the third";
}

// Ranks lie at different places of one section; parts of a slice stay apart on all of them.
TEST(DeriveWaits, SlicesCountAsThoseOfAllRanks) {
  const Fragment fragment =
      FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 32, 64)}},
                  {StreamId::kDownload, {OnDevice(Access::kRead, 32, 32, 64)}},
                  {StreamId::kUpdate, {OnDevice(Access::kRead, 0, 16, 64)}},
                  {StreamId::kCompute, {OnDevice(Access::kRead, 192, 16)}},
                  {StreamId::kGather, {OnDevice(Access::kWrite, 0, 64 * kSlices)}}});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{}) << "another part of the slice";
  EXPECT_EQ(WaitsOf(fragment, 2), Waits{0});
  EXPECT_EQ(WaitsOf(fragment, 3), Waits{0}) << "the last rank's";
  EXPECT_EQ(WaitsOf(fragment, 4), (Waits{3, 2, 1}));
}

// Two ranks cut a secondary copy, so that it ends behind the second part.
TEST(DeriveWaits, PartsOfASecondaryCopyCountAsThoseOfItsRanks) {
  Operand part = OnDevice(Access::kRead, 0, 64, 64);
  part.place.of_secondary = true;
  const Fragment fragment = FragmentOf({{StreamId::kGather, {part}},
                                        {StreamId::kUpload, {OnDevice(Access::kWrite, 64, 64)}},
                                        {StreamId::kReduce, {OnDevice(Access::kWrite, 128, 64)}}});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{0}) << "the second rank's";
  EXPECT_EQ(WaitsOf(fragment, 2), Waits{});
}

TEST(DeriveWaits, SectionsThatShareMemoryConflictWhole) {
  const Fragment fragment =
      FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 32, 64)}},
                  {StreamId::kDownload, {OnDevice(Access::kWrite, 48, 16, 128)}}});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{0});
}

// A step of other rounds uses slots that no fragment has which memory was cut by.
TEST(Cells, BytesThatNoFragmentTouchesHaveCells) {
  const Fragment fragment = FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 64, 64)}}});
  const Fragment* const only[] = {&fragment};
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
  EXPECT_FALSE(of_other_pool.empty()) << "a pool that the fragment does not touch";
}

// The slices that were cut by are parts of longer ones.
TEST(Cells, BytesOfASliceAfterTheLastCutHaveCells) {
  const Fragment fragment =
      FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 16, 64)}},
                  {StreamId::kDownload, {OnDevice(Access::kWrite, 16, 16, 64)}}});
  const Fragment* const only[] = {&fragment};
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

TEST(DeriveWaits, CarriedInstructionsBelongToTheOtherParity) {
  const int64_t constants = ControlCells(kUnits).constants();
  const Fragment fragment =
      FragmentOf({{StreamId::kUpdate, {Control(Access::kRead, constants)}, /*carried=*/true},
                  {StreamId::kReduce, {Control(Access::kWrite, constants)}},
                  {StreamId::kHostUpdate, {Control(Access::kRead, constants)}}});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{}) << "of the next step";
  EXPECT_EQ(WaitsOf(fragment, 2), Waits{1});
}

// Through the frontier, whichever fragment ran before.

class Runs {
 public:
  // The earlier instructions that each instruction waits for, as numbers over all runs.
  std::vector<std::vector<int>> Run(const Fragment& fragment, int parity) {
    std::vector<std::vector<int>> all;
    std::vector<int> events;
    for (const Instruction& each : fragment.instructions) {
      std::vector<int> waits;
      for (int wait : each.waits) frontier_.Follow(each.starts, events[static_cast<size_t>(wait)]);
      frontier_.Enter(each.starts, each.enters, parity,
                      [&](int event) { waits.push_back(number_[static_cast<size_t>(event)]); });
      const int event = frontier_.AddEvent(each.ends);
      number_.push_back(issued_++);
      events.push_back(event);
      frontier_.Issue(each.starts, each.ends, event);
      frontier_.Leave(each.leaves, parity, event);
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

TEST(Frontier, TheFirstUsesOfAFragmentWaitForTheLastOfThoseBeforeIt) {
  const Fragment fragment = FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                        {StreamId::kGather, {OnDevice(Access::kRead, 0, 64)}},
                                        {StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}}});
  Runs runs;
  EXPECT_EQ(runs.Run(fragment, 0), (std::vector<Waits>{{}, {}, {}}));
  EXPECT_EQ(runs.Run(fragment, 1)[0], (Waits{2, 1})) << "both that read";
  runs.Clear();
  EXPECT_EQ(runs.Run(fragment, 0)[0], Waits{});
}

// So the instructions between two of round_begins may run again.
TEST(Frontier, WaitsAreFoundBetweenFragmentsToo) {
  const Fragment fragment = FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                        {StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}},
                                        {StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                                        {StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}}},
                                       /*round_begins=*/{2});
  EXPECT_EQ(WaitsOf(fragment, 1), Waits{0});
  EXPECT_EQ(WaitsOf(fragment, 2), Waits{});
  EXPECT_EQ(WaitsOf(fragment, 3), Waits{2});
  EXPECT_EQ(Runs().Run(fragment, 0)[2], Waits{1});
}

TEST(Frontier, NothingIsWaitedForTwice) {
  const Fragment write = FragmentOf({{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}}}),
                 read = FragmentOf({{StreamId::kCompute, {OnDevice(Access::kRead, 0, 64)}}});
  Runs runs;
  runs.Run(write, 0);
  EXPECT_EQ(runs.Run(read, 0)[0], Waits{0});
  EXPECT_EQ(runs.Run(read, 0)[0], Waits{}) << "the stream is behind the write already";
}

TEST(Frontier, AUseReplacesEarlierUsesThatItWaitedFor) {
  const Fragment before = FragmentOf(
                     {{StreamId::kUpload, {OnDevice(Access::kWrite, 0, 64)}},
                      {StreamId::kGather,
                       {OnDevice(Access::kRead, 0, 64), OnDevice(Access::kWrite, 64, 64)}}}),
                 after = FragmentOf({{StreamId::kCompute, {OnDevice(Access::kRead, 0, 128)}}});
  const Fragment* const both[] = {&before, &after};
  const Cells cells(both, kUnits, kSlices, kSecondarySlices);
  Fragment first = before, second = after;
  for (Fragment* fragment : {&first, &second}) DeriveWaits(cells, *fragment);
  Runs runs;
  runs.Run(first, 0);
  EXPECT_EQ(runs.Run(second, 0)[0], Waits{1}) << "the gather has waited for the upload";
}

TEST(Frontier, StepsOfOneParityMeetAgain) {
  const int64_t constants = ControlCells(kUnits).constants();
  const Fragment fragment = FragmentOf({{StreamId::kReduce, {Control(Access::kWrite, constants)}},
                                        {StreamId::kUpdate, {Control(Access::kRead, constants)}}});
  Runs runs;
  runs.Run(fragment, 0);
  EXPECT_EQ(runs.Run(fragment, 1)[0], Waits{});
  EXPECT_EQ(runs.Run(fragment, 0)[0], Waits{1}) << "the update of the step before the last";
}

}  // namespace
}  // namespace ebb::sharding::waits_test
