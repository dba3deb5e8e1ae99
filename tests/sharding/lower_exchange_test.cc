#include "ebb/sharding/lower_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/unit_places.h"
#include "random_model.h"

namespace ebb::sharding::lower_exchange_test {
namespace {

using ::testing::ElementsAreArray;

bool IsOfExchange(OperationKind kind) {
  using enum OperationKind;
  for (OperationKind of :
       {kSeal, kExchange, kConclude, kSealNorms, kExchangeNorms, kConcludeNorms, kCopyControl})
    if (kind == of) return true;
  return false;
}

// The exchange of a plan, in the order of the reduce stream.
std::vector<const Operation*> ExchangeOf(const Plan& plan) {
  std::vector<const Operation*> found;
  for (const Operation& operation : plan.operations)
    if (IsOfExchange(operation.kind)) found.push_back(&operation);
  return found;
}

bool HasNormsOn(const Plan& plan, bool device) {
  const std::vector<SubGroup>& groups = plan.pools.placement.sub_groups;
  return std::any_of(groups.begin(), groups.end(), [&](const SubGroup& group) {
    return (group.tier == Tier::kDevice) == device &&
           plan.decisions.norm_states[static_cast<size_t>(group.unit)] >= 0;
  });
}

std::vector<OperationKind> Expected(const Plan& plan, bool walk) {
  using enum OperationKind;
  std::vector<OperationKind> kinds = {kSeal, kCopyControl, kExchange, kCopyControl, kConclude};
  if (walk) return kinds;
  kinds.push_back(kCopyControl);
  if (!plan.decisions.has_norms()) return kinds;
  if (HasNormsOn(plan, /*device=*/true)) kinds.push_back(kCopyControl);
  kinds.push_back(kSealNorms);
  if (LayOutNormRecords(plan.layout, plan.decisions).exchanged)
    kinds.insert(kinds.end(), {kCopyControl, kExchangeNorms, kCopyControl});
  kinds.insert(kinds.end(), {kConcludeNorms, kCopyControl});
  return kinds;
}

template <class Check>
void ForEachPlan(Check check) {
  for (int number = 1; number <= 60; ++number) {
    const RandomCase random(static_cast<uint64_t>(number), /*offloads=*/number % 2 == 0);
    SCOPED_TRACE(random.description());
    const absl::StatusOr<Plan> step = PlanStep(random.inputs()), walk = PlanWalk(random.inputs());
    ASSERT_TRUE(step.ok()) << step.status();
    ASSERT_TRUE(walk.ok()) << walk.status();
    for (const Plan* plan : {&*step, &*walk}) {
      const bool has_backward =
          std::any_of(plan->scopes.begin(), plan->scopes.end(),
                      [](const PlannedScope& scope) { return scope.backward; });
      check(*plan, /*walk=*/!has_backward);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(LowerExchange, EachPartIsAnOperationOfItsOwn) {
  ForEachPlan([](const Plan& plan, bool walk) {
    std::vector<OperationKind> kinds;
    for (const Operation* operation : ExchangeOf(plan)) kinds.push_back(operation->kind);
    ASSERT_THAT(kinds, ElementsAreArray(Expected(plan, walk)));
  });
}

// A record goes from the cell where it is sealed to the cells that are concluded from, through the
// staging pool.
TEST(LowerExchange, EachPartReadsTheOutputOfThePartBefore) {
  ForEachPlan([](const Plan& plan, bool) {
    const std::vector<const Operation*> parts = ExchangeOf(plan);
    const ControlCells cells(static_cast<int>(plan.layout.units.size()));
    for (size_t i = 1; i < parts.size(); ++i) {
      const std::span<const Operand> before = parts[i - 1]->operands, here = parts[i]->operands;
      const bool ends = before.back().place.pool == StateClass::kControl &&
                        before.back().place.offset == cells.device_constants();
      const bool follows = std::any_of(before.begin(), before.end(), [&](const Operand& written) {
        return Writes(written.access) &&
               std::any_of(here.begin(), here.end(), [&](const Operand& read) {
                 return Reads(read.access) && read.place == written.place &&
                        read.bytes() == written.bytes();
               });
      });
      ASSERT_EQ(follows, !ends) << "part " << i;
    }
  });
}

// Every gradient whose name it may look for: where updates wait for the verdict, in memory.
TEST(LowerExchange, ARecordIsCompletedAfterTheGradientsThatItChecks) {
  int looks = 0;
  ForEachPlan([&](const Plan& plan, bool walk) {
    const Operation& seal = *ExchangeOf(plan).front();
    std::vector<Place> shards, expected;
    for (const Operand& operand : seal.operands)
      if (operand.place.pool == StateClass::kGradient && operand.access != Access::kNone)
        shards.push_back(operand.place);
    for (size_t u = 0; u < plan.layout.units.size(); ++u) {
      const bool reads = !walk && plan.decisions.timing != UpdateTiming::kEarly &&
                         plan.layout.units[u].trainable.shard > 0 &&
                         plan.pools.placement.units[u].gradient != Tier::kNvme;
      if (reads) expected.push_back(GradientSlicePlace(plan, static_cast<int>(u)));
    }
    ASSERT_EQ(shards.size(), expected.size());
    for (size_t i = 0; i < shards.size(); ++i) ASSERT_TRUE(shards[i] == expected[i]);
    looks += static_cast<int>(expected.size());
  });
  EXPECT_GT(looks, 0);
}

// On the host they need no copy: an update there waits for the verdict alone.
TEST(LowerExchange, UpdatesReadConstantsWhereTheyRun) {
  int on_host = 0, on_device = 0;
  ForEachPlan([&](const Plan& plan, bool) {
    const ControlCells cells(static_cast<int>(plan.layout.units.size()));
    for (const Operation& operation : plan.operations) {
      if (operation.kind != OperationKind::kUpdate) continue;
      const bool early = operation.updates.front().early;
      const bool device = operation.stream == StreamId::kUpdate;
      (device ? on_device : on_host) += 1;
      const int64_t cell = device ? (early ? cells.device_early() : cells.device_constants())
                                  : (early ? cells.early() : cells.constants());
      ASSERT_TRUE(std::any_of(
          operation.operands.begin(), operation.operands.end(), [&](const Operand& operand) {
            return operand.place.pool == StateClass::kControl && operand.place.offset == cell;
          }));
    }
  });
  EXPECT_GT(on_host, 0);
  EXPECT_GT(on_device, 0);
}

}  // namespace
}  // namespace ebb::sharding::lower_exchange_test
