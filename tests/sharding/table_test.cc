// Where the arrays of random models lie.
#include "ebb/sharding/table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "ebb/sharding/plan.h"
#include "plan_variants.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::table_test {
namespace {

template <class Check>
void ForRandomTables(const Check& check) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    check(plan.table);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Table, ARowIsFoundByWhatItIsFor) {
  ForRandomTables([](const Table& table) {
    for (int row = 0; row < std::ssize(table.rows); ++row) {
      const Array& array = table[row];
      const int found = table.Find(array.purpose, array.of, array.trainable, array.state);
      ASSERT_EQ(found, array.same_as < 0 ? row : array.same_as)
          << FactsOf(array.purpose).name << " of " << array.of;
    }
  });
}

TEST(Table, ExtentsCoverTheElementsInOrder) {
  ForRandomTables([](const Table& table) {
    for (int row = 0; row < std::ssize(table.rows); ++row) {
      int64_t covered = 0;
      for (const Extent& extent : table.ExtentsOf(row)) {
        ASSERT_EQ(extent.begin, covered);
        ASSERT_GT(extent.end, extent.begin);
        covered = extent.end;
        ASSERT_EQ(extent.place.pool, FactsOf(table[row].purpose).counted);
        ASSERT_EQ(table.PlaceOf(row, extent.begin), extent.place);
        const int64_t last = (extent.count() - 1) * table[row].encoding.code_bytes();
        ASSERT_EQ(table.PlaceOf(row, extent.end - 1), extent.place.Plus(last));
      }
      ASSERT_EQ(covered, table[row].elements) << FactsOf(table[row].purpose).name;
      ASSERT_TRUE(table[row].same_as < 0 || covered == 0) << "it is another array's memory";
    }
  });
}

// Those that share their memory by lifetime have laws of their own (Pack).
TEST(Table, ArraysThatDoNotShareLieApartWithinTheirPools) {
  ForRandomTables([](const Table& table) {
    // By tier and pool; the states file is one for all classes but parameters.
    std::map<std::pair<Tier, StateClass>, std::vector<std::pair<int64_t, int64_t>>> taken;
    bool is_shared = false;
    for (int row = 0; row < std::ssize(table.rows); ++row) {
      const Array& array = table[row];
      if (!array.behind) is_shared = array.shares;
      for (const Extent& extent : table.ExtentsOf(row)) {
        const Place& place = extent.place;
        const int64_t bytes = extent.count() * array.encoding.code_bytes();
        const bool of_states = place.tier == Tier::kNvme && place.pool != StateClass::kParameter;
        const int64_t pool =
            of_states ? table.bytes.state_file() : table.bytes.Of(place.tier, place.pool);
        for (int turn = 0; turn < array.turns; ++turn) {
          const int64_t begin = place.offset + turn * array.turn_bytes;
          ASSERT_LE(begin + bytes, pool) << FactsOf(array.purpose).name;
          if (!is_shared)
            taken[{place.tier, of_states ? StateClass::kMaster : place.pool}].emplace_back(
                begin, begin + bytes);
        }
      }
    }
    for (auto& [pool, ranges] : taken) {
      std::sort(ranges.begin(), ranges.end());
      for (size_t i = 1; i < ranges.size(); ++i)
        ASSERT_LE(ranges[i - 1].second, ranges[i].first) << Name(pool.first) << Name(pool.second);
    }
  });
}

TEST(Table, TheSlicesOfAllRanksAreTheWholeArray) {
  ForRandomTables([](const Table& table) {
    for (int row = 0; row < std::ssize(table.rows); ++row) {
      const Array& array = table[row];
      if (FactsOf(array.purpose).of != ArrayOf::kSection || array.elements == 0) continue;
      int64_t covered = 0;
      for (const Extent& own : table.OwnExtents(row)) {
        ASSERT_EQ(own.begin, covered);
        covered = own.end;
        ASSERT_EQ(table.OwnSlice(row, own.begin), own.place);
      }
      if (array.spread == Spread::kWhole) {
        ASSERT_EQ(covered * table.slices, array.elements);
        ASSERT_EQ(table.OwnSlice(row).per_slice, covered * array.encoding.code_bytes());
      } else {
        ASSERT_EQ(covered, array.elements);
        ASSERT_EQ(table.OwnSlice(row).per_slice, 0);
      }
    }
  });
}

// An update finds each sub-group's part where its unit's array has that element.
TEST(Table, ASubGroupHasAnExtentOfEachUpdatedArray) {
  ForRandomTables([](const Table& table) {
    for (int g = 0; g < std::ssize(table.sub_groups); ++g) {
      const SubGroup& group = table.sub_groups[static_cast<size_t>(g)];
      for (int state = 0; state < table.states; ++state) {
        const int row = table.Find(Purpose::kState, group.unit, /*trainable=*/true, state);
        ASSERT_EQ(table.PlaceOfSubGroup(row, g), table.PlaceOf(row, group.begin));
        ASSERT_EQ(table.PlaceOfSubGroup(row, g).tier, group.tier);
      }
    }
  });
}

// 15 k elements of bf16 stay in RAM, the first units first: 10 k of unit 0 and 5 k of unit 1.
TEST(Table, AGatherReadsFromTheSwapFileWhatIsNotInRam) {
  constexpr int64_t k = kCutElements;
  const ModelSpec model = UnitChain({10 * k, 10 * k, 10 * k});
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.offload_param = {
      .device = Tier::kNvme, .nvme_paths = {"/disk"}, .max_in_cpu = 15 * k + 100};
  config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  ASSERT_OK_AND_ASSIGN(
      const Plan plan,
      PlanStep({.model = &model, .config = &config, .world = 1, .optimizer_states = 2}));
  const Table& table = plan.table;
  EXPECT_EQ(SwapBytes(table, 0), 0);
  EXPECT_EQ(SwapBytes(table, 1), 5 * k * 2);
  EXPECT_EQ(SwapBytes(table, 2), 10 * k * 2);
  const int parameters = table.Find(Purpose::kParameter, 1);
  EXPECT_EQ(table.ExtentOf(parameters, 5 * k - 1).place.tier, Tier::kCpu);
  EXPECT_EQ(table.ExtentOf(parameters, 5 * k).place.tier, Tier::kNvme);
  for (const SubGroup& group : table.SubGroupsOf(1))
    EXPECT_EQ(ParameterTierOf(table, group), group.begin < 5 * k ? Tier::kCpu : Tier::kNvme);
}

TEST(Table, ANameWithoutARowHasNoPlaceAndNoElements) {
  const Table empty;
  EXPECT_EQ(empty.Find(Purpose::kMasterSlot), -1);
  EXPECT_EQ(empty.ElementsOf(Purpose::kMasterSlot), 0);
  EXPECT_EQ(empty.PlaceOf(-1), Place{});
  EXPECT_EQ(empty.TurnOf(-1, 3), Place{});
  EXPECT_FALSE(HasBoundaries(empty));
}

}  // namespace
}  // namespace ebb::sharding::table_test
