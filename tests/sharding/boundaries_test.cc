#include "ebb/sharding/boundaries.h"

#include <gtest/gtest.h>

#include <vector>

#include "ebb/sharding/declared_order.h"
#include "ebb/sharding/plan.h"
#include "unit_chain.h"

namespace ebb::sharding {

bool operator==(const BoundaryUse& a, const BoundaryUse& b) {
  return a.writer == b.writer && a.reader == b.reader && a.again == b.again;
}
void PrintTo(const BoundaryUse& use, std::ostream* out) {
  *out << "F" << use.writer << " F" << use.reader << " again " << use.again;
}

namespace boundaries_test {
namespace {

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
  ASSERT_TRUE(CheckOrder(model).ok()) << CheckOrder(model);
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

// Of 16 visits in order, 15 boundaries are live at once, and the first gradient. In segments of 4:
// the inputs of three segments, the three inside of one, and a gradient.
TEST(Boundaries, SegmentsShareMemory) {
  constexpr int64_t kBytes = 1'024;
  Config config;
  config.gradient_accumulation_steps = 1;
  ModelSpec model = UnitChain(std::vector<int64_t>(16, 4), kBytes);
  const auto kept = [&] {
    const absl::StatusOr<Plan> plan = PlanStep({.model = &model, .config = &config, .world = 1});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? plan->pools.bytes[static_cast<int>(StateClass::kActivation)] / kBytes : 0;
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
}  // namespace boundaries_test
}  // namespace ebb::sharding
