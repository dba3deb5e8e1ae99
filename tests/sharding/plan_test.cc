// The laws of the plan over random models, worlds and configs.
#include "ebb/sharding/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ebb/sharding/pool.h"
#include "random_model.h"
#include "replay.h"
#include "unit_chain.h"

namespace ebb::sharding {
namespace {

using ::testing::HasSubstr;

int ConfiguredRounds(const Config& config) {
  return static_cast<int>(config.gradient_accumulation_steps / config.ebb.micro_batches_per_round);
}

// Every number of a Pools.
std::vector<int64_t> Flat(const Pools& pools) {
  std::vector<int64_t> flat(pools.bytes, pools.bytes + kStateClasses);
  for (const UnitAddresses& u : pools.units) {
    flat.insert(flat.end(), {u.parameter_trainable, u.parameter_frozen, u.gradient_shard,
                             u.gather_trainable, u.gather_frozen});
  }
  for (const SubGroup& g : pools.homes.sub_groups)
    flat.insert(flat.end(), {g.master.offset, g.states.offset, g.states_stride});
  for (const VisitAddresses& v : pools.visits)
    flat.insert(flat.end(), {v.gradient, v.output, v.output_gradient, v.boundary_stride});
  flat.insert(flat.end(), {pools.staging_cast, pools.staging_norm, pools.staging_exchange,
                           pools.staging_gradient, pools.evaluation_micro_batches});
  return flat;
}

struct Variant {
  Plan plan;
  bool walk = false;
};

// The config's own step first, then what else may run on its pools.
std::vector<Variant> Variants(const RandomCase& random_case) {
  std::vector<Variant> variants;
  const auto add = [&](absl::StatusOr<Plan> plan, bool walk) {
    ASSERT_TRUE(plan.ok()) << plan.status();
    variants.push_back({*std::move(plan), walk});
  };
  Random random(random_case.seed + 1'000'000);
  const PlanInputs inputs = random_case.inputs();
  add(PlanStep(inputs), false);
  add(PlanWalk(inputs), true);
  add(PlanStep(inputs, 1), false);
  add(PlanStep(inputs, 0, /*hold_updates=*/true), false);
  if (ConfiguredRounds(random_case.config) > 1) {
    add(PlanStep(inputs, static_cast<int>(random.Between(2, 6))), false);
    add(PlanStep(inputs, static_cast<int>(random.Between(2, 6)), random.OneIn(2)), false);
  }
  return variants;
}

// What is there when it is used, and what shares memory never lives at once: over steps, walks and
// every variant, one after another.
TEST(PlanLaws, NothingIsUsedBeforeItIsThereAndNoTwoLiveThingsOverlap) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    ASSERT_FALSE(variants.empty());
    Random random(seed);
    Replay replay(random_case.inputs(), variants.front().plan,
                  static_cast<int>(random.Between(0, random_case.world - 1)));
    replay.Step(variants.front().plan);
    replay.Step(variants.front().plan);
    for (int i = 0; i < 6; ++i) {
      const Variant& variant = variants[random.Between(0, std::ssize(variants) - 1)];
      variant.walk ? replay.Walk(variant.plan) : replay.Step(variant.plan);
    }
    ASSERT_EQ(replay.violation(), "");
  }
}

// A trainer may leave units out where it keeps the boundaries itself: what waits for their scopes
// does not stand in for what an update waits for.
TEST(PlanLaws, UnitsLeftOutAreUpdatedInOrder) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    RandomCase random_case(seed);
    for (Visit& visit : random_case.model.forward) visit.output_bytes = 0;
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    Random random(seed);
    Replay replay(random_case.inputs(), *plan, /*rank=*/0);
    for (int i = 0; i < 4; ++i) {
      std::vector<bool> left_out(random_case.model.units.size());
      for (size_t u = 0; u < left_out.size(); ++u) left_out[u] = random.OneIn(2);
      replay.Step(*plan, left_out);
    }
    ASSERT_EQ(replay.violation(), "");
  }
}

TEST(PlanLaws, EveryVariantHasTheSamePools) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    for (const Variant& variant : variants)
      ASSERT_EQ(Flat(variant.plan.pools), Flat(variants.front().plan.pools));
  }
}

TEST(PlanLaws, AddressesAreAligned) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    Pools pools = plan->pools;
    for (int64_t& bytes : pools.bytes) bytes = 0;
    pools.evaluation_micro_batches = 0;
    for (int64_t address : Flat(pools)) ASSERT_EQ(address % kPoolAlignment, 0);
  }
}

// The executor walks moments and issues operations as they come.
TEST(PlanLaws, MomentsIssueEveryOperationOnceAfterWhatItWaitsFor) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      const int scopes = static_cast<int>(plan.scopes.size());
      ASSERT_EQ(std::ssize(plan.moments), 2 * scopes + 2);
      ASSERT_EQ(plan.moments.front().kind, Moment::kBegin);
      ASSERT_EQ(plan.moments.back().kind, Moment::kFinish);
      for (int s = 0; s < scopes; ++s) {
        ASSERT_EQ(plan.moments[2 * s + 1].kind, Moment::kOpen);
        ASSERT_EQ(plan.moments[2 * s + 2].kind, Moment::kClose);
        ASSERT_EQ(plan.moments[2 * s + 1].scope, s);
        ASSERT_EQ(plan.moments[2 * s + 2].scope, s);
      }
      int issued = 0;
      const auto is_known = [&](const Dependency& dependency) {
        if (dependency.kind == Dependency::kOperation)
          return dependency.index >= 0 && dependency.index < issued;
        return dependency.kind == Dependency::kExchanged ||
               (dependency.index >= 0 && dependency.index < std::ssize(plan.layout.units));
      };
      for (const Moment& moment : plan.moments) {
        for (int index : moment.operations) {
          ASSERT_EQ(index, issued);
          for (const Dependency& dependency : plan.operations[index].after)
            ASSERT_TRUE(is_known(dependency)) << index;
          ++issued;
        }
        for (const Dependency& dependency : moment.compute) ASSERT_TRUE(is_known(dependency));
      }
      ASSERT_EQ(issued, std::ssize(plan.operations));
    }
  }
}

TEST(PlanLaws, EveryScopesGradientIsReducedOnceARoundOrOnceAStep) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const bool at_step = !random_case.config.reduces_at_round();
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      std::map<int, int> reductions;  // by scope
      for (int i = 0; i < std::ssize(plan.operations); ++i) {
        if (plan.operations[i].kind != OperationKind::kReduce) continue;
        for (const Part& part : plan.operations[i].parts) {
          ASSERT_EQ(plan.scopes[part.scope].unit, part.unit);
          ASSERT_EQ(plan.reduce_of_scope[part.scope], i);
          ++reductions[part.scope];
        }
      }
      for (int s = 0; s < std::ssize(plan.scopes); ++s) {
        const PlannedScope& scope = plan.scopes[s];
        const bool reduces = scope.backward &&
                             IsTrainable(random_case.model, static_cast<UnitId>(scope.unit)) &&
                             (!at_step || scope.round == plan.decisions.rounds - 1);
        ASSERT_EQ(reductions[s], reduces ? 1 : 0) << "scope " << s;
        ASSERT_EQ(plan.reduce_of_scope[s] >= 0, reduces) << "scope " << s;
      }
    }
  }
}

TEST(PlanLaws, EveryTrainableUnitIsUpdatedOnceAndRefreshedWhereItIsKeptWholeInSlices) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      std::map<int, int> updates, refreshes;  // by unit
      for (const Operation& operation : plan.operations) {
        for (const Part& part : operation.parts) {
          if (operation.kind == OperationKind::kUpdate) ++updates[part.unit];
          if (operation.kind == OperationKind::kRefresh) ++refreshes[part.unit];
        }
      }
      for (int u = 0; u < std::ssize(plan.layout.units); ++u) {
        const bool is_updated =
            !variant.walk && IsTrainable(random_case.model, static_cast<UnitId>(u));
        const bool is_refreshed = is_updated && random_case.shards() > 1 &&
                                  random_case.config.zero.stage > 0 && plan.decisions.kept_whole[u];
        ASSERT_EQ(updates[u], is_updated ? 1 : 0) << "unit " << u;
        ASSERT_EQ(refreshes[u], is_refreshed ? 1 : 0) << "unit " << u;
      }
    }
  }
}

TEST(PlanLaws, EachKindOfOperationHasItsStream) {
  const std::map<OperationKind, StreamId> streams = {
      {OperationKind::kMark, StreamId::kCompute},
      {OperationKind::kGather, StreamId::kGather},
      {OperationKind::kRefresh, StreamId::kGather},
      {OperationKind::kCast, StreamId::kReduce},
      {OperationKind::kReduce, StreamId::kReduce},
      {OperationKind::kAllReduce, StreamId::kReduce},
      {OperationKind::kRound, StreamId::kReduce},
      {OperationKind::kAccumulate, StreamId::kReduce},
      {OperationKind::kNorm, StreamId::kReduce},
      {OperationKind::kGatherGradient, StreamId::kReduce},
      {OperationKind::kExchange, StreamId::kReduce},
      {OperationKind::kUpdate, StreamId::kUpdate}};
  for (int seed = 1; seed <= Cases(100); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      for (const Operation& operation : variant.plan.operations)
        ASSERT_EQ(operation.stream, streams.at(operation.kind));
    }
  }
}

// Clipping, overflow checks and held updates need all gradients before the first update.
TEST(PlanLaws, UpdatesStartUnderBackwardOnlyWhereNothingNeedsAllGradientsFirst) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const Config& config = random_case.config;
    for (bool hold : {false, true}) {
      const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs(), 0, hold);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const bool early = !hold && config.gradient_clipping == 0 && !config.checks_overflow() &&
                         config.ebb.asynchronous_step == AsynchronousStep::kAuto;
      ASSERT_EQ(plan->decisions.timing == UpdateTiming::kEarly, early);
      bool exchanged = false;
      for (const Operation& operation : plan->operations) {
        exchanged |= operation.kind == OperationKind::kExchange;
        ASSERT_TRUE(operation.kind != OperationKind::kUpdate || exchanged == !early);
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
    ASSERT_TRUE(plan.ok() && again.ok());
    ASSERT_EQ(plan->hash, again->hash);
    ASSERT_TRUE(hashes.insert(plan->hash).second);
  }
}

// Gathers at the begin of a step of equal units.
struct AheadCase {
  const char* name;
  void (*set)(Config&);
  int gathers;
};
class PlanAtItsBegin : public testing::TestWithParam<AheadCase> {};

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
  const absl::StatusOr<Plan> plan = PlanStep({.model = &model, .config = &config, .world = 2});
  ASSERT_TRUE(plan.ok()) << plan.status();
  int gathers = 0;
  for (int index : plan->moments.front().operations)
    gathers += plan->operations[index].kind == OperationKind::kGather;
  EXPECT_EQ(gathers, GetParam().gathers);
}

INSTANTIATE_TEST_SUITE_P(
    Limits, PlanAtItsBegin,
    testing::Values(
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
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("gradient_accumulation_steps is 2"));
}

TEST(Plan, PassesOnWhatTheModelIsRefusedFor) {
  RandomCase random_case(1);
  random_case.model.parameters.front().init = {};
  EXPECT_THAT(std::string(PlanStep(random_case.inputs()).status().message()),
              HasSubstr(random_case.model.parameters.front().name));
}

}  // namespace
}  // namespace ebb::sharding
