#include "ebb/sharding/passes/residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/passes/boundaries.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/scopes.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding {
bool operator==(const BoundaryUse& a, const BoundaryUse& b) {
  return a.writer == b.writer && a.reader == b.reader && a.again == b.again;
}
void PrintTo(const BoundaryUse& use, std::ostream* out) {
  *out << "F" << use.writer << " F" << use.reader << " again " << use.again;
}

namespace residency_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<PlannedScope> Scopes(const std::vector<int>& visits, int rounds) {
  std::vector<PlannedScope> scopes;
  const int count = static_cast<int>(visits.size());
  for (int round = 0; round < rounds; ++round) {
    for (int v = 0; v < count; ++v)
      scopes.push_back({.backward = false, .round = round, .visit = v, .unit = visits[v]});
    for (int v = count - 1; v >= 0; --v)
      scopes.push_back({.backward = true, .round = round, .visit = v, .unit = visits[v]});
  }
  for (int s = 0; s < static_cast<int>(scopes.size()); ++s) {
    scopes[s].open_tick = 2 * s + 1;
    scopes[s].close_tick = 2 * s + 2;
  }
  return scopes;
}

struct Case {
  explicit Case(uint64_t seed) {
    Random random(seed);
    const int units = static_cast<int>(random.Between(1, 6));
    std::vector<int> visits(random.Between(1, 10));
    for (int& unit : visits) unit = static_cast<int>(random.Between(0, units - 1));
    scopes = Scopes(visits, static_cast<int>(random.Between(1, 3)));
    for (int u = 0; u < units; ++u) {
      elements.push_back(random.OneOf<int64_t>({10, 10, 50, random.Between(1, 100)}));
      kept_whole.push_back(random.OneIn(6));
    }
    limits = {.prefetch_depth = random.OneOf<int64_t>({0, 1, 2, 4, INT64_MAX}),
              .prefetch_elements = random.OneOf<int64_t>({0, 30, INT64_MAX, INT64_MAX}),
              .live_elements = random.OneOf<int64_t>({1, 60, 200, INT64_MAX, INT64_MAX}),
              .reuse_elements = random.OneOf<int64_t>({0, 50, INT64_MAX, INT64_MAX}),
              .group_elements = random.OneOf<int64_t>({0, 25, 80, INT64_MAX}),
              .reshard_after_forward = random.OneIn(2)};
    residency = PlanResidency(scopes, elements, kept_whole, limits);
  }

  const ResidencyInterval& FirstOf(const GatherGroup& group) const {
    return residency.intervals[group.intervals.front()];
  }
  int64_t ElementsOf(const GatherGroup& group) const {
    int64_t sum = 0;
    for (int i : group.intervals) sum += elements[residency.intervals[i].unit];
    return sum;
  }
  // Whether the limits let group `g` be gathered ahead of its use while scope `current` is the one
  // in use and all groups before `g` have been gathered.
  bool MayBeAhead(size_t g, int current) const {
    int64_t units_ahead = 0, elements_ahead = 0, live = 0;
    for (size_t other = 0; other < g; ++other) {
      for (int i : residency.groups[other].intervals) {
        const ResidencyInterval& interval = residency.intervals[i];
        if (interval.first > current) ++units_ahead, elements_ahead += elements[interval.unit];
        if (interval.last >= current) live += elements[interval.unit];
      }
    }
    return units_ahead < limits.prefetch_depth && elements_ahead < limits.prefetch_elements &&
           live + ElementsOf(residency.groups[g]) <= limits.live_elements &&
           SlotsAreFree(g, current);
  }
  // Whether earlier intervals of every unit of group `g` have ended.
  bool SlotsAreFree(size_t g, int current) const {
    for (int i : residency.groups[g].intervals) {
      const ResidencyInterval& interval = residency.intervals[i];
      for (const ResidencyInterval& other : residency.intervals) {
        if (other.unit == interval.unit && other.first < interval.first && other.last >= current)
          return false;
      }
    }
    return true;
  }

  std::vector<PlannedScope> scopes;
  std::vector<int64_t> elements;
  std::vector<bool> kept_whole;
  ResidencyLimits limits;
  Residency residency;
};

TEST(Residency, EveryScopeOfAUnitInSlicesIsInOneInterval) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed);
    for (int s = 0; s < std::ssize(c.scopes); ++s) {
      const int64_t intervals = std::count_if(
          c.residency.intervals.begin(), c.residency.intervals.end(),
          [&](const ResidencyInterval& interval) {
            return interval.unit == c.scopes[s].unit && interval.first <= s && s <= interval.last;
          });
      ASSERT_EQ(intervals, c.kept_whole[c.scopes[s].unit] ? 0 : 1) << "scope " << s;
    }
    for (const ResidencyInterval& interval : c.residency.intervals) {
      ASSERT_EQ(c.scopes[interval.first].unit, interval.unit);
      ASSERT_EQ(c.scopes[interval.last].unit, interval.unit);
    }
  }
}

// From one use of a unit to its next.
TEST(Residency, AUnitIsKeptForAnAdjacentUseOrForBackwardIfAskedAndReleasedBeforeAFarOne) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed);
    for (int from = 0; from < std::ssize(c.scopes); ++from) {
      if (c.kept_whole[c.scopes[from].unit]) continue;
      int to = from + 1;
      int64_t distance = 0;
      for (; to < std::ssize(c.scopes); ++to) {
        distance += c.elements[c.scopes[to].unit];
        if (c.scopes[to].unit == c.scopes[from].unit) break;
      }
      if (to == std::ssize(c.scopes)) continue;
      const bool may_wait = !c.limits.reshard_after_forward && !c.scopes[from].backward &&
                            c.scopes[from].round == c.scopes[to].round;
      const bool intervals = std::any_of(c.residency.intervals.begin(), c.residency.intervals.end(),
                                         [&](const ResidencyInterval& interval) {
                                           return interval.unit == c.scopes[from].unit &&
                                                  interval.first <= from && to <= interval.last;
                                         });
      ASSERT_EQ(intervals, (to == from + 1 || may_wait) && distance <= c.limits.reuse_elements)
          << from << " to " << to;
    }
  }
}

TEST(Residency, AUnitIsGatheredOnceAnIntervalAfterItsLastIntervalEnds) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed);
    std::vector<int> released(c.elements.size(), -1);  // tick
    int next = 0, tick = 0;
    for (const GatherGroup& group : c.residency.groups) {
      ASSERT_GE(group.issue, tick);
      tick = group.issue;
      for (int i : group.intervals) {
        ASSERT_EQ(i, next++);
        const ResidencyInterval& interval = c.residency.intervals[i];
        ASSERT_LE(group.issue, c.scopes[interval.first].open_tick);
        ASSERT_GT(group.issue, released[interval.unit]) << "unit " << interval.unit;
        released[interval.unit] = c.scopes[interval.last].close_tick;
      }
    }
    ASSERT_EQ(next, std::ssize(c.residency.intervals));
  }
}

TEST(Residency, AGroupIsOfOneDirectionAndWithinTheLimits) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed);
    for (const GatherGroup& group : c.residency.groups) {
      for (int i : group.intervals) {
        const PlannedScope& scope = c.scopes[c.residency.intervals[i].first];
        ASSERT_EQ(scope.round, c.scopes[c.FirstOf(group).first].round);
        ASSERT_EQ(scope.backward, c.scopes[c.FirstOf(group).first].backward);
      }
      if (group.intervals.size() == 1) continue;
      ASSERT_LE(c.ElementsOf(group), c.limits.group_elements);
      ASSERT_LE(c.ElementsOf(group), c.limits.live_elements);
    }
  }
}

// A group is gathered at the opening of the scope that needs it, or as many openings before it as
// the limits allow: no later, no earlier.
TEST(Residency, PrefetchGoesExactlyAsFarAsTheBudgets) {
  for (int seed = 1; seed <= Cases(2'000); ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed);
    for (size_t g = 0; g < c.residency.groups.size(); ++g) {
      const GatherGroup& group = c.residency.groups[g];
      const int needed = c.FirstOf(group).first;
      ASSERT_TRUE(group.issue == 0 || group.issue % 2 == 1) << "only begin and opening issue";
      const int current = std::max(0, (group.issue - 1) / 2);
      ASSERT_TRUE(current == needed || c.MayBeAhead(g, current)) << "group " << g << " is early";
      if (c.limits.prefetch_depth == 0) {
        ASSERT_EQ(group.issue, c.scopes[needed].open_tick);
        continue;
      }
      if (group.issue == 0) continue;
      // One opening earlier, or at the begin, something was in the way: groups go in order.
      const int before = current == 0 ? 0 : current - 1;
      const int ticks_before = current == 0 ? 0 : c.scopes[before].open_tick;
      const bool follows = g == 0 || c.residency.groups[g - 1].issue <= ticks_before;
      ASSERT_FALSE(follows && before >= needed) << "group " << g << " is late";
      ASSERT_FALSE(follows && c.MayBeAhead(g, before)) << "group " << g << " is late";
    }
  }
}

TEST(Residency, ASlotLivesFromTheGatherToTheCloseOfTheLastScope) {
  for (int seed = 1; seed <= Cases(500); ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed);
    std::vector<size_t> seen(c.elements.size(), 0);
    for (const GatherGroup& group : c.residency.groups) {
      for (int i : group.intervals) {
        const ResidencyInterval& interval = c.residency.intervals[i];
        const Lifetime& life = c.residency.lifetimes[interval.unit].at(seen[interval.unit]++);
        ASSERT_EQ(life.begin, group.issue);
        ASSERT_EQ(life.end, c.scopes[interval.last].close_tick);
      }
    }
    for (size_t u = 0; u < seen.size(); ++u) ASSERT_EQ(c.residency.lifetimes[u].size(), seen[u]);
  }
}

// "unit first-last@tick" of each interval.
std::vector<std::string> Described(const Residency& residency) {
  std::vector<std::string> lines;
  for (const GatherGroup& group : residency.groups) {
    for (int i : group.intervals) {
      const ResidencyInterval& interval = residency.intervals[i];
      lines.push_back(
          absl::StrCat(interval.unit, " ", interval.first, "-", interval.last, "@", group.issue));
    }
  }
  return lines;
}

TEST(Residency, GathersOneAheadAndKeepsTheUnitOfTheNextBackward) {
  const std::vector<int64_t> elements(3, 10);
  const Residency residency = PlanResidency(Scopes({0, 1, 2}, 1), elements,
                                            std::vector<bool>(3, false), {.prefetch_depth = 1});
  EXPECT_THAT(Described(residency),
              ElementsAre("0 0-0@0", "1 1-1@0", "2 2-3@3", "1 4-4@5", "0 5-5@9"));
}

TEST(Residency, WithoutReshardingAUnitStaysFromForwardToBackward) {
  const std::vector<int64_t> elements(3, 10);
  const Residency residency =
      PlanResidency(Scopes({0, 1, 2}, 1), elements, std::vector<bool>(3, false),
                    {.prefetch_depth = 0, .reshard_after_forward = false});
  EXPECT_THAT(Described(residency), ElementsAre("0 0-5@1", "1 1-4@3", "2 2-3@5"));
}

// Scopes of ModelSpec::order.

// F0( F1 F2 F0)  B0( B2 B1 B0): the root stays gathered, because its
// backward comes next; the blocks come and go.
TEST(Residency, AUnitStaysWhileAScopeOfItIsOpen) {
  ModelSpec model = UnitChain({10, 10, 10});
  for (const bool backward : {false, true}) {
    model.order.push_back({.backward = backward, .visit = 0});
    for (int visit : {1, 2})
      model.AddScope({.backward = backward, .visit = backward ? 3 - visit : visit});
    model.order.push_back({.opens = false, .backward = backward, .visit = 0});
  }
  const std::vector<PlannedScope> scopes = ScopesOfStep(model, 1);
  const std::vector<int64_t> elements(3, 10);
  // No reuse at a distance: an open unit stays at any cost.
  const Residency residency = PlanResidency(scopes, elements, std::vector<bool>(3, false),
                                            {.prefetch_depth = 0, .reuse_elements = 30});
  EXPECT_THAT(Described(residency),
              ElementsAre("0 0-3@1", "1 1-1@2", "2 2-2@4", "2 4-4@8", "1 5-5@10"));
  ASSERT_EQ(residency.lifetimes[0].size(), 1u);
  EXPECT_EQ(residency.lifetimes[0].front().end, 12) << "the close of its backward";
}

// F0 F1 F2  R0 R1 R2 B2 B1 B0
TEST(Residency, ARecomputeGathersAndItsUnitStaysForABackwardThatComesNext) {
  ModelSpec model = UnitChain({10, 10, 10});
  for (int visit = 0; visit < 3; ++visit) model.AddScope({.visit = visit});
  for (int visit = 0; visit < 3; ++visit) model.AddScope({.recompute = true, .visit = visit});
  for (int visit = 2; visit >= 0; --visit) model.AddScope({.backward = true, .visit = visit});
  const std::vector<int64_t> elements(3, 10);
  const Residency residency = PlanResidency(ScopesOfStep(model, 1), elements,
                                            std::vector<bool>(3, false), {.prefetch_depth = 0});
  EXPECT_THAT(Described(residency), ElementsAre("0 0-0@1", "1 1-1@3", "2 2-2@5", "0 3-3@7",
                                                "1 4-4@9", "2 5-6@11", "1 7-7@15", "0 8-8@17"));
}

// Unit 2's second use in backward comes before the first use of unit 0 there is over.
TEST(Residency, DoesNotGatherAUnitWithAGroupThatComesBeforeItsRelease) {
  const std::vector<int64_t> elements(4, 10);
  const Residency residency =
      PlanResidency(Scopes({0, 1, 0, 2, 3, 2}, 1), elements, std::vector<bool>(4, false),
                    {.prefetch_depth = 0, .group_elements = 1'000, .reshard_after_forward = false});
  EXPECT_THAT(Described(residency),
              ElementsAre("0 0-9@1", "1 1-10@1", "2 3-6@1", "3 4-7@1", "2 8-8@17", "0 11-11@23"));
}

// Six units of 10. Two have room in a slot of 100 elements.
TEST(Residency, AGroupHasRoomInOneSlot) {
  const std::vector<int64_t> elements(6, 10);
  ResidencyLimits limits{.prefetch_depth = 0,
                         .group_elements = 1'000,
                         .slot_elements = std::vector<int64_t>(6, 50),
                         .slot_elements_max = 100};
  const auto groups = [&] {
    std::vector<size_t> sizes;
    for (const GatherGroup& group :
         PlanResidency(Scopes({0, 1, 2, 3, 4, 5}, 1), elements, std::vector<bool>(6, false), limits)
             .groups)
      sizes.push_back(group.intervals.size());
    return sizes;
  };
  EXPECT_THAT(groups(), ElementsAre(2, 2, 2, 2, 2, 1));  // the last unit stays for its backward
  limits.slot_elements_max = 99;
  EXPECT_THAT(groups(), ::testing::Each(1));
  limits.slot_elements_max = 10;  // a unit that is larger is alone
  EXPECT_THAT(groups(), ::testing::Each(1));
  limits.slot_elements = {};
  EXPECT_THAT(groups(), ElementsAre(6, 5));
}

TEST(Residency, UnitsKeptWholeAreNeverGathered) {
  const std::vector<int64_t> elements(2, 10);
  const Residency residency =
      PlanResidency(Scopes({0, 1}, 2), elements, std::vector<bool>(2, true), {});
  EXPECT_THAT(residency.groups, IsEmpty());
  EXPECT_THAT(residency.lifetimes, ElementsAre(IsEmpty(), IsEmpty()));
}

// Secondary shards change over which ranks a unit is gathered, not when it is there.
TEST(Residency, WithSecondaryShardsOnlyAUnitsFirstIntervalIsGatheredOverAllRanks) {
  int from_secondary = 0;
  for (int seed = 1; seed <= Cases(300); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Case c(static_cast<uint64_t>(seed));
    c.limits.has_secondary = true;
    const Residency residency = PlanResidency(c.scopes, c.elements, c.kept_whole, c.limits);
    ASSERT_EQ(residency.intervals.size(), c.residency.intervals.size());
    std::vector<int> intervals(c.elements.size()), so_far = intervals;
    for (const ResidencyInterval& interval : residency.intervals) ++intervals[interval.unit];
    for (size_t i = 0; i < residency.intervals.size(); ++i) {
      const ResidencyInterval &interval = residency.intervals[i],
                              &without = c.residency.intervals[i];
      ASSERT_EQ(interval.unit, without.unit);
      ASSERT_EQ(interval.first, without.first);
      ASSERT_EQ(interval.last, without.last);
      ASSERT_FALSE(without.from_secondary || without.fills_secondary);
      const bool first = so_far[interval.unit]++ == 0;
      ASSERT_EQ(interval.from_secondary, !first);
      ASSERT_EQ(interval.fills_secondary, first && intervals[interval.unit] > 1);
      from_secondary += interval.from_secondary;
    }
    for (const GatherGroup& group : residency.groups) {
      for (int i : group.intervals)
        ASSERT_EQ(residency.intervals[i].from_secondary, group.from_secondary);
    }
  }
  EXPECT_GT(from_secondary, 0);
}

//   scope  0  1  2  3   4  5  6  7
//         F0 F1 F2 F3  B3 B2 B1 B0
// What visit v writes, visit v + 1 reads in its forward and in its backward.
TEST(Boundaries, AreWrittenByAVisitAndReadByTheNext) {
  const ModelSpec model = UnitChain({1, 1, 1, 1});
  const std::vector<BoundaryUse> expected = {{.writer = 0, .reader = 1, .again = 6},
                                             {.writer = 1, .reader = 2, .again = 5},
                                             {.writer = 2, .reader = 3, .again = 4},
                                             {.writer = 3}};
  EXPECT_EQ(UsesInRound(ScopesOfStep(model, 1), 0, 4), expected);
}

TEST(Boundaries, ARoundHasUsesInItsOwnScopesOnly) {
  const ModelSpec model = UnitChain({1, 1});  // F0 F1 B1 B0 | F0 F1 B1 B0
  const std::vector<PlannedScope> scopes = ScopesOfStep(model, 2);
  const std::vector<BoundaryUse> first = {{.writer = 0, .reader = 1, .again = 2}, {.writer = 1}};
  const std::vector<BoundaryUse> second = {{.writer = 4, .reader = 5, .again = 6}, {.writer = 5}};
  EXPECT_EQ(UsesInRound(scopes, 0, 2), first);
  EXPECT_EQ(UsesInRound(scopes, 4, 2), second);
}

// F0 F1 F2  B2: backward ends at the first trainable visit.
TEST(Boundaries, BeforeTheFirstTrainableVisitAreNotReadAgain) {
  ModelSpec model = UnitChain({1, 1, 1});
  model.parameters[0].trainable = model.parameters[1].trainable = false;
  const std::vector<BoundaryUse> expected = {
      {.writer = 0, .reader = 1}, {.writer = 1, .reader = 2, .again = 3}, {.writer = 2}};
  EXPECT_EQ(UsesInRound(ScopesOfStep(model, 1), 0, 3), expected);
}

TEST(Boundaries, AWalkReadsEachOnce) {
  const std::vector<BoundaryUse> expected = {{.writer = 0, .reader = 1}, {.writer = 1}};
  EXPECT_EQ(UsesInRound(ScopesOfWalk(UnitChain({1, 1})), 0, 2), expected);
}

//   scope  0  1  2  3   4  5  6  7  8  9 10 11
//         F0 F1 F2 F3  R2 R3 B3 B2 R0 R1 B1 B0
// What a recompute reads comes for it. A boundary that a recompute writes again is not kept from
// forward.
TEST(Boundaries, SegmentsKeepTheirInputsOnly) {
  ModelSpec model = UnitChain({1, 1, 1, 1});
  for (int v = 0; v < 4; ++v) model.AddScope({.visit = v});
  for (int begin : {2, 0}) {
    for (int v : {begin, begin + 1}) model.AddScope({.recompute = true, .visit = v});
    for (int v : {begin + 1, begin}) model.AddScope({.backward = true, .visit = v});
  }
  ASSERT_OK(CheckOrder(model));
  const std::vector<BoundaryUse> expected = {{.writer = 0, .reader = 1},
                                             {.writer = 1, .reader = 2, .again = 4},
                                             {.writer = 2, .reader = 3},
                                             {.writer = 3}};
  EXPECT_EQ(UsesInRound(ScopesOfStep(model, 1), 0, 4), expected);
}

// The boundary stays for the scope after its reader, 2, and is back one scope before its backward.
// With backward 4 that is scope 3, so it is never away. With backward 5 it is away in 3.
TEST(Boundaries, AreEvictedIfThereIsTimeBetweenWriteAndRead) {
  const std::vector<PlannedScope> scopes = ScopesOfStep(UnitChain({1, 1, 1}), 1);
  const auto leaves = [&](const BoundaryUse& use) { return LeavesDevice(scopes, use); };
  EXPECT_FALSE(leaves({.writer = 0, .reader = 1, .again = 2}));
  EXPECT_FALSE(leaves({.writer = 0, .reader = 1, .again = 4}));
  EXPECT_TRUE(leaves({.writer = 0, .reader = 1, .again = 5}));
  EXPECT_FALSE(leaves({.writer = 0, .reader = 1}));  // nothing reads it again
  EXPECT_FALSE(leaves({.writer = 0}));
  EXPECT_FALSE(leaves({}));
}

// 15 boundaries of 16 visits in order are live at once, and the first gradient. In segments of 4:
// the inputs of three segments, the three inside of one, and a gradient.
TEST(Boundaries, SegmentsShareMemory) {
  constexpr int64_t kBytes = 1'024;
  Config config;
  config.gradient_accumulation_steps = 1;
  ModelSpec model = UnitChain(std::vector<int64_t>(16, 4), kBytes);
  const auto kept = [&] {
    const absl::StatusOr<Plan> plan = PlanStep({.model = &model, .config = &config, .world = 1});
    EXPECT_OK(plan);
    return plan.ok() ? plan->table.bytes.Of(Tier::kDevice, StateClass::kActivation) / kBytes : 0;
  };
  EXPECT_EQ(kept(), 15 + 1);
  for (int v = 0; v < 16; ++v) model.AddScope({.visit = v});
  for (int end = 16; end > 0; end -= 4) {
    for (int v = end - 4; v < end; ++v) model.AddScope({.recompute = true, .visit = v});
    for (int v = end - 1; v >= end - 4; --v) model.AddScope({.backward = true, .visit = v});
  }
  EXPECT_EQ(kept(), 3 + 3 + 1);
}

}  // namespace
}  // namespace residency_test
}  // namespace ebb::sharding
