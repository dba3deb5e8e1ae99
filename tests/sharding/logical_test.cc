#include "ebb/sharding/logical.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "passes_of.h"
#include "random_model.h"

namespace ebb::sharding::logical_test {
namespace {

using Kind = LogicalOp::Kind;

template <class Check>
void ForEachCase(PlanKind kind, Check check) {
  for (int seed = 1; seed <= Cases(200); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/seed % 4 != 0,
                                 /*orders=*/seed % 3 == 0);
    SCOPED_TRACE(random_case.description());
    const PassesOf passes(random_case.inputs(), kind);
    check(passes);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Logical, GroupsAreGatheredAtTheirTickInOrder) {
  for (const PlanKind kind : {PlanKind::kStep, PlanKind::kWalk}) {
    ForEachCase(kind, [](const PassesOf& passes) {
      int next = 0;
      // The moment of tick t is the t-th.
      for (size_t tick = 0; tick < passes.logical.size(); ++tick) {
        for (const LogicalOp& operation : passes.logical[tick].operations) {
          if (operation.kind != Kind::kGather) continue;
          ASSERT_EQ(operation.index, next);
          ASSERT_EQ(passes.residency.groups[static_cast<size_t>(next)].issue,
                    static_cast<int>(tick));
          ++next;
        }
      }
      ASSERT_EQ(next, std::ssize(passes.residency.groups));
    });
  }
}

// Its last use is the upload to the device, or the update that shares the read.
TEST(Logical, ASlotIsReadIntoWhenItsLastUseIsIssued) {
  ForEachCase(PlanKind::kStep, [](const PassesOf& passes) {
    std::set<int> read, uploaded, updated;
    for (const LogicalOp& operation : passes.Operations()) {
      switch (operation.kind) {
        case Kind::kReadParameters: {
          const SwapIn& swap_in = passes.swap_ins.reads[static_cast<size_t>(operation.index)];
          ASSERT_TRUE(read.insert(operation.index).second);
          ASSERT_TRUE(swap_in.after < 0 || uploaded.contains(swap_in.after));
          for (int unit : swap_in.behind) ASSERT_TRUE(updated.contains(unit));
          break;
        }
        case Kind::kUploadParameters: {
          const int swap_in = passes.swap_ins.of_group[static_cast<size_t>(operation.index)];
          ASSERT_TRUE(swap_in < 0 || read.contains(swap_in));
          uploaded.insert(swap_in);
          break;
        }
        case Kind::kUpdate:
          updated.insert(
              passes.plan.pools.placement.sub_groups[static_cast<size_t>(operation.index)].unit);
          break;
        default:
          break;
      }
    }
    ASSERT_EQ(read.size(), passes.swap_ins.reads.size());
  });
}

TEST(Logical, EverySubGroupIsReadAndThenUpdatedOnce) {
  ForEachCase(PlanKind::kStep, [](const PassesOf& passes) {
    std::set<int> read, updated;
    for (const LogicalOp& operation : passes.Operations()) {
      if (operation.kind == Kind::kReadStates) {
        ASSERT_TRUE(read.insert(operation.index).second);
      }
      if (operation.kind != Kind::kUpdate) continue;
      ASSERT_TRUE(read.contains(operation.index));
      ASSERT_TRUE(updated.insert(operation.index).second);
    }
    ASSERT_EQ(updated.size(), passes.plan.pools.placement.sub_groups.size());
  });
}

TEST(Logical, EarlyUpdatesFollowTheirLastReduction) {
  ForEachCase(PlanKind::kStep, [](const PassesOf& passes) {
    std::set<int> complete;
    for (const LogicalOp& operation : passes.Operations()) {
      if (operation.kind == Kind::kReduce) {
        for (int s : passes.reduction.groups[static_cast<size_t>(operation.index)])
          if (passes.reduction.is_last[static_cast<size_t>(s)])
            complete.insert(passes.plan.scopes[static_cast<size_t>(s)].unit);
      }
      if (operation.kind != Kind::kUpdate) continue;
      const int unit =
          passes.plan.pools.placement.sub_groups[static_cast<size_t>(operation.index)].unit;
      ASSERT_TRUE(passes.swap_ins.carried[static_cast<size_t>(unit)] || complete.contains(unit));
    }
  });
}

// An evaluation tells what became of it, and leaves states and gradients alone.
TEST(Logical, AWalkReadsGathersAndExchanges) {
  ForEachCase(PlanKind::kWalk, [](const PassesOf& passes) {
    for (const LogicalOp& operation : passes.Operations()) {
      ASSERT_TRUE(operation.kind == Kind::kMark || operation.kind == Kind::kReadParameters ||
                  operation.kind == Kind::kUploadParameters || operation.kind == Kind::kGather ||
                  operation.kind == Kind::kCheck || operation.kind == Kind::kExchange)
          << operation.kind;
    }
  });
}

TEST(Logical, ADrainRunsTheCarriedUpdatesAndNothingElse) {
  ForEachCase(PlanKind::kDrain, [](const PassesOf& passes) {
    std::set<int> units, carried;
    for (const LogicalOp& operation : passes.Operations()) {
      ASSERT_TRUE(operation.kind == Kind::kReadStates || operation.kind == Kind::kUpdate);
      units.insert(
          passes.plan.pools.placement.sub_groups[static_cast<size_t>(operation.index)].unit);
    }
    for (size_t u = 0; u < passes.swap_ins.carried.size(); ++u)
      if (passes.swap_ins.carried[u]) carried.insert(static_cast<int>(u));
    ASSERT_EQ(units, carried);
  });
}

}  // namespace
}  // namespace ebb::sharding::logical_test
