#include "ebb/sharding/boundaries.h"

#include <gtest/gtest.h>

#include <vector>

#include "unit_chain.h"

namespace ebb::sharding {

bool operator==(const BoundaryUse& a, const BoundaryUse& b) {
  return a.writer == b.writer && a.reader == b.reader && a.backward == b.backward;
}
void PrintTo(const BoundaryUse& use, std::ostream* out) {
  *out << "F" << use.writer << " F" << use.reader << " B" << use.backward;
}

namespace {

//   scope  0  1  2  3   4  5  6  7
//         F0 F1 F2 F3  B3 B2 B1 B0
// What visit v writes, visit v + 1 reads in its forward and in its backward.
TEST(Boundaries, AreWrittenByAVisitAndReadByTheNext) {
  const ModelSpec model = UnitChain({1, 1, 1, 1});
  const std::vector<BoundaryUse> expected = {{.writer = 0, .reader = 1, .backward = 6},
                                             {.writer = 1, .reader = 2, .backward = 5},
                                             {.writer = 2, .reader = 3, .backward = 4},
                                             {.writer = 3}};
  EXPECT_EQ(UsesInRound(ScopesOfStep(model, 1), 0, 4), expected);
}

TEST(Boundaries, OfARoundAreItsOwnScopesOnly) {
  const ModelSpec model = UnitChain({1, 1});  // F0 F1 B1 B0 | F0 F1 B1 B0
  const std::vector<PlannedScope> scopes = ScopesOfStep(model, 2);
  const std::vector<BoundaryUse> first = {{.writer = 0, .reader = 1, .backward = 2}, {.writer = 1}};
  const std::vector<BoundaryUse> second = {{.writer = 4, .reader = 5, .backward = 6},
                                           {.writer = 5}};
  EXPECT_EQ(UsesInRound(scopes, 0, 2), first);
  EXPECT_EQ(UsesInRound(scopes, 4, 2), second);
}

// F0 F1 F2  B2: backward ends at the first trainable visit.
TEST(Boundaries, BeforeTheFirstTrainableVisitAreNotReadAgain) {
  ModelSpec model = UnitChain({1, 1, 1});
  model.parameters[0].trainable = model.parameters[1].trainable = false;
  const std::vector<BoundaryUse> expected = {
      {.writer = 0, .reader = 1}, {.writer = 1, .reader = 2, .backward = 3}, {.writer = 2}};
  EXPECT_EQ(UsesInRound(ScopesOfStep(model, 1), 0, 3), expected);
}

TEST(Boundaries, OfAWalkAreReadOnce) {
  const std::vector<BoundaryUse> expected = {{.writer = 0, .reader = 1}, {.writer = 1}};
  EXPECT_EQ(UsesInRound(ScopesOfWalk(UnitChain({1, 1})), 0, 2), expected);
}

// It stays for the scope after its reader, 2, and is back in the one before its backward: with
// backward 4 that is scope 3, which leaves none in which it is away; with backward 5 it is away in 3.
TEST(Boundaries, LeaveWhereThereIsTimeBetweenGoingAndComing) {
  EXPECT_FALSE(LeavesDevice({.writer = 0, .reader = 1, .backward = 2}));
  EXPECT_FALSE(LeavesDevice({.writer = 0, .reader = 1, .backward = 4}));
  EXPECT_TRUE(LeavesDevice({.writer = 0, .reader = 1, .backward = 5}));
  EXPECT_FALSE(LeavesDevice({.writer = 0, .reader = 1}));  // nothing reads it again
  EXPECT_FALSE(LeavesDevice({.writer = 0}));
  EXPECT_FALSE(LeavesDevice({}));
}

}  // namespace
}  // namespace ebb::sharding
