// Which operations a plan has, on which streams and when, over random models, worlds and configs.
#include "ebb/sharding/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/scopes.h"
#include "plan_variants.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_test {
namespace {

TEST(PlanLaws, MovesGoFromTierToTierAndTransfersAreAligned) {
  const std::map<Role, std::pair<Tier, Tier>> ways = {
      {Role::kRead, {Tier::kNvme, Tier::kCpu}},
      {Role::kUpload, {Tier::kCpu, Tier::kDevice}},
      {Role::kDownload, {Tier::kDevice, Tier::kCpu}},
      {Role::kWrite, {Tier::kCpu, Tier::kNvme}}};
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      for (const Op& operation : variant.plan.ops) {
        const auto way = ways.find(operation.role);
        ASSERT_EQ(way == ways.end(), operation.moves().empty());
        int64_t bytes = 0;
        for (const Move move : operation.moves()) {
          ASSERT_EQ(move.from.tier, way->second.first);
          ASSERT_EQ(move.to.tier, way->second.second);
          ASSERT_GT(move.bytes, 0);
          bytes += move.bytes;
          if (std::max(move.from.tier, move.to.tier) != Tier::kNvme) continue;
          for (int64_t number : {move.bytes, move.from.offset, move.to.offset})
            ASSERT_EQ(number % kSwapAlignment, 0);
          ASSERT_EQ(move.from.per_slice, 0);
          ASSERT_EQ(move.to.per_slice, 0);
        }
        if (way != ways.end()) {
          ASSERT_EQ(operation.bytes, bytes);
        }
      }
    }
  }
}

// An engine walks moments and issues operations as they come.
TEST(PlanLaws, MomentsIssueEveryOperationOnce) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      const int scopes = static_cast<int>(plan.scopes.size());
      ASSERT_EQ(std::ssize(plan.moments), 2 * scopes + 2);
      ASSERT_EQ(plan.moments.front().kind, Moment::kBegin);
      ASSERT_EQ(plan.moments.back().kind, Moment::kFinish);
      for (int s = 0; s < scopes; ++s) {
        const PlannedScope& scope = plan.scopes[s];
        ASSERT_LT(s == 0 ? 0 : plan.scopes[s - 1].open_tick, scope.open_tick);
        ASSERT_LT(scope.open_tick, scope.close_tick);
        ASSERT_EQ(plan.moments[scope.open_tick].kind, Moment::kOpen);
        ASSERT_EQ(plan.moments[scope.close_tick].kind, Moment::kClose);
        ASSERT_EQ(plan.moments[scope.open_tick].scope, s);
        ASSERT_EQ(plan.moments[scope.close_tick].scope, s);
        if (random_case.model.order.empty()) {
          ASSERT_EQ(scope.open_tick, 2 * s + 1);
          ASSERT_EQ(scope.close_tick, 2 * s + 2);
        }
      }
      int issued = 0;
      for (const Moment& moment : plan.moments) {
        for (int index = moment.begin; index < moment.end; ++index) {
          ASSERT_EQ(index, issued);
          ++issued;
        }
      }
      ASSERT_EQ(issued, std::ssize(plan.ops));
    }
  }
}

TEST(PlanLaws, EachKindOfOperationHasItsStream) {
  using enum StreamId;
  const std::map<Role, std::set<StreamId>> streams = {
      {Role::kMark, {kCompute}},
      {Role::kScopes, {kCompute}},
      {Role::kGather, {kGather}},
      {Role::kFillSecondary, {kGather}},
      {Role::kGatherSecondary, {kGather}},
      {Role::kRefresh, {kGather}},
      {Role::kSumTensor, {kReduce}},
      {Role::kCast, {kReduce}},
      {Role::kReduce, {kReduce}},
      {Role::kAllReduce, {kReduce}},
      {Role::kRound, {kReduce}},
      // kHostSum: gradients that are kept in host memory.
      {Role::kAccumulate, {kReduce, kHostSum}},
      {Role::kNorm, {kReduce, kHostSum}},
      {Role::kGatherGradient, {kReduce}},
      {Role::kPrepare, {kReduce}},
      {Role::kSeal, {kReduce}},
      {Role::kExchange, {kReduce}},
      {Role::kConclude, {kReduce}},
      {Role::kParameterNorms, {kUpdate, kHostUpdate}},
      {Role::kSealNorms, {kReduce}},
      {Role::kExchangeNorms, {kReduce}},
      {Role::kConcludeNorms, {kReduce}},
      {Role::kCopyControl, {kReduce}},
      {Role::kUpdate, {kUpdate, kHostUpdate}},
      {Role::kRead, {kReadParameters, kReadStates}},
      {Role::kCastMasters, {kReadParameters}},
      {Role::kUpload, {kUpload}},
      {Role::kDownload, {kDownload}},
      {Role::kWrite, {kWrite}}};
  for (int number = 1; number <= Cases(200); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      for (const Op& operation : variant.plan.ops) {
        ASSERT_TRUE(streams.at(operation.role).contains(operation.stream));
        if (operation.role != Role::kUpdate && operation.role != Role::kParameterNorms) continue;
        const SubGroup& group = variant.plan.table.sub_groups[operation.updates.front().sub_group];
        ASSERT_EQ(operation.stream, group.tier == Tier::kDevice ? kUpdate : kHostUpdate);
      }
    }
  }
}

// Evaluations, which come between any steps, know of no secondary shards.
TEST(PlanLaws, AfterAUnitsFirstGatherNoByteOfItsParametersCrossesTheGroupsOfSecondaryShards) {
  int later = 0;
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      const bool has_secondary = plan.decisions.has_secondary() && !variant.walk;
      std::vector<int> gathers(plan.layout.units.size()), fills = gathers;
      for (size_t i = 0; i < plan.ops.size(); ++i) {
        const Op& operation = plan.ops[i];
        const bool fill = operation.role == Role::kFillSecondary;
        const bool from_secondary = operation.role == Role::kGatherSecondary;
        if (!fill && !from_secondary && operation.role != Role::kGather) continue;
        ASSERT_TRUE(has_secondary || operation.role == Role::kGather);
        // A fill is right behind its gather, and keeps parts of some units of the gather.
        ASSERT_TRUE(!fill || plan.ops[i - 1].role == Role::kGather);
        for (const Part& part : operation.parts) {
          const size_t unit = static_cast<size_t>(part.unit);
          if (fill) {
            ++fills[unit];
            ASSERT_TRUE(std::any_of(plan.ops[i - 1].parts.begin(), plan.ops[i - 1].parts.end(),
                                    [&](const Part& of) { return of.unit == part.unit; }));
          } else if (from_secondary) {
            ASSERT_EQ(fills[unit], 1) << "unit " << unit;
            ++later;
          } else {
            ++gathers[unit];
          }
        }
      }
      for (size_t unit = 0; has_secondary && unit < gathers.size(); ++unit) {
        ASSERT_LE(gathers[unit], 1) << "unit " << unit;
        ASSERT_LE(fills[unit], 1) << "unit " << unit;
      }
    }
  }
  EXPECT_GT(later, 0);
}

// Clipping, overflow checks, norms of parameters and held updates need all gradients before the
// first update.
TEST(PlanLaws, UpdatesStartUnderBackwardOnlyWhereNothingNeedsAllGradientsFirst) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const Config& config = random_case.config;
    for (bool hold : {false, true}) {
      ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs(), 0, hold));
      const bool norms = random_case.TakesNorms();
      const bool early = !hold && !norms && config.gradient_clipping == 0 &&
                         !config.checks_overflow() &&
                         config.ebb.asynchronous_step == AsynchronousStep::kAuto;
      ASSERT_EQ(plan.decisions.timing == UpdateTiming::kEarly, early);
      bool exchanged = false, norms_exchanged = !norms;
      for (const Op& operation : plan.ops) {
        exchanged |= operation.role == Role::kConclude;
        norms_exchanged |= operation.role == Role::kConcludeNorms;
        // Carried updates are the step before's.
        if (operation.when == When::kCarrying) continue;
        ASSERT_TRUE(operation.role != Role::kUpdate || exchanged == !early);
        ASSERT_TRUE(operation.role != Role::kUpdate || norms_exchanged);
        ASSERT_TRUE(operation.role != Role::kParameterNorms || exchanged);
      }
    }
  }
}

TEST(PlanLaws, TheSameInputsGiveTheSameHashAndAnotherPlanAnother) {
  std::set<uint64_t> hashes;
  for (int seed = 1; seed <= 50; ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    const absl::StatusOr<Plan> again = PlanStep(RandomCase(seed).inputs());
    ASSERT_OK(plan);
    ASSERT_OK(again);
    ASSERT_EQ(Fingerprint(*plan), Fingerprint(*again));
    ASSERT_TRUE(hashes.insert(Fingerprint(*plan)).second);
  }
}

// Gathers at the begin of a step of equal units.
struct AheadCase {
  const char* name;
  void (*set)(Config&);
  int gathers;
};
void PrintTo(const AheadCase& ahead, std::ostream* out) {
  *out << ahead.name;
}
class PlanAtItsBegin : public ::testing::TestWithParam<AheadCase> {};

TEST_P(PlanAtItsBegin, GathersAsFarAheadAsTheConfigSays) {
  constexpr int64_t kElements = 4'096;
  const ModelSpec model = UnitChain(std::vector<int64_t>(6, kElements));
  Config config;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.ebb.prefetch_depth = INT64_MAX;
  config.ebb.coalesce_bytes = 0;
  GetParam().set(config);
  ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep({.model = &model, .config = &config, .world = 2}));
  int gathers = 0;
  for (int index = 0; index < plan.moments.front().end; ++index)
    gathers += plan.ops[index].role == Role::kGather;
  EXPECT_EQ(gathers, GetParam().gathers);
}

INSTANTIATE_TEST_SUITE_P(
    Limits, PlanAtItsBegin,
    ::testing::Values(
        AheadCase{"AllOfForward", [](Config&) {}, 6},
        AheadCase{"Depth", [](Config& c) { c.ebb.prefetch_depth = 1; }, 2},
        AheadCase{"PrefetchBucket", [](Config& c) { c.zero.prefetch_bucket_size = 2 * 4'096; }, 3},
        AheadCase{"LiveParameters", [](Config& c) { c.zero.max_live_parameters = 4 * 4'096; }, 4},
        AheadCase{"NoOverlap", [](Config& c) { c.zero.overlap_comm = false; }, 0},
        AheadCase{"Coalesced",
                  [](Config& c) {
                    c.ebb.prefetch_depth = 1;
                    c.ebb.coalesce_bytes = 3 * 4'096 * 4;
                  },
                  1}),
    [](const auto& test) { return test.param.name; });

TEST(Plan, RefusesMoreRoundsThanItsPoolsHold) {
  RandomCase random_case(1);
  random_case.config.gradient_accumulation_steps = random_case.config.ebb.micro_batches_per_round =
      2;
  const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs(), 3);
  EXPECT_THAT(plan.status(), testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                               "gradient_accumulation_steps is 2"));
}

TEST(Plan, ReturnsTheModelsError) {
  RandomCase random_case(1);
  random_case.model.parameters.front().init = {};
  EXPECT_THAT(PlanStep(random_case.inputs()).status(),
              testing::Says(random_case.model.parameters.front().name));
}

}  // namespace
}  // namespace ebb::sharding::plan_test
