#include "ebb/sharding/interval.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "ebb/sharding/layout.h"
#include "random_model.h"

namespace ebb::sharding::interval_test {
namespace {

std::vector<Section> SectionsOf(const RandomCase& random_case) {
  const absl::StatusOr<ModelLayout> layout = LayOut(random_case.model, random_case.world);
  EXPECT_TRUE(layout.ok()) << layout.status();
  std::vector<Section> sections;
  for (const UnitLayout& unit : layout->units) {
    if (unit.trainable.elements > 0) sections.push_back(unit.trainable);
    if (unit.frozen.elements > 0) sections.push_back(unit.frozen);
  }
  return sections;
}

TEST(Interval, RanksTileEveryParameter) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Section& section : SectionsOf(random_case)) {
      std::map<ParameterId, int64_t> covered;  // elements so far, without gap or overlap
      for (int rank = 0; rank < random_case.world; ++rank) {
        for (const Interval& interval : IntervalsOf(section, rank)) {
          ASSERT_LT(interval.begin, interval.end);
          ASSERT_EQ(interval.begin, covered[interval.parameter]);
          covered[interval.parameter] = interval.end;
        }
      }
      for (const Placement& placement : section.placements)
        ASSERT_EQ(covered[placement.parameter], placement.elements);
    }
  }
}

TEST(Interval, SaysWhichElementIsAtEachOffsetOfARange) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    Random random(seed);
    for (const Section& section : SectionsOf(random_case)) {
      const int64_t begin = random.Between(0, section.elements);
      const int64_t end = random.Between(begin, section.elements);
      int64_t elements = 0;
      for (const Interval& interval : IntervalsIn(section, begin, end)) {
        for (const Placement& placement : section.placements) {
          if (placement.parameter != interval.parameter) continue;
          ASSERT_EQ(begin + interval.offset, placement.offset + interval.begin);
        }
        ASSERT_GE(interval.offset, 0);
        ASSERT_LE(interval.offset + interval.end - interval.begin, end - begin);
        elements += interval.end - interval.begin;
      }
      int64_t expected = 0;  // all but the padding
      for (const Placement& placement : section.placements) {
        const int64_t from = std::max(begin, placement.offset);
        expected +=
            std::max<int64_t>(0, std::min(end, placement.offset + placement.elements) - from);
      }
      ASSERT_EQ(elements, expected);
    }
  }
}

TEST(Interval, RespectsRowCuts) {
  int cuts = 0;
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Section& section : SectionsOf(random_case)) {
      for (int rank = 0; rank < random_case.world; ++rank) {
        for (const Interval& interval : IntervalsOf(section, rank)) {
          const ParameterSpec& parameter = random_case.model[interval.parameter];
          if (parameter.cut_rows == 0) continue;
          const int64_t row = Elements(parameter.shape) / parameter.shape.front();
          ASSERT_EQ(interval.begin % (parameter.cut_rows * row), 0);
          cuts += interval.begin > 0;
        }
      }
    }
  }
  EXPECT_GT(cuts, 10);
}

TEST(Interval, PaddingHasNoIntervals) {
  const Section section{.placements = {{ParameterId{0}, 0, 10}}, .shard = 64, .elements = 128};
  EXPECT_EQ(IntervalsOf(section, 0).size(), 1u);
  EXPECT_TRUE(IntervalsOf(section, 1).empty());
  EXPECT_TRUE(IntervalsIn(section, 10, 64).empty());
  EXPECT_TRUE(IntervalsIn(section, 5, 5).empty());
}

}  // namespace
}  // namespace ebb::sharding::interval_test
