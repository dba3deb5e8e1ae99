// The laws of the plan over random models, worlds and configs.
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

#include "ebb/sharding/declared_order.h"
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

// Every address of a Pools.
std::vector<int64_t> Addresses(const Pools& pools) {
  std::vector<int64_t> all;
  const auto add = [&](std::initializer_list<int64_t> addresses) {
    all.insert(all.end(), addresses);
  };
  for (const UnitAddresses& u : pools.units) {
    add({u.parameter_trainable, u.parameter_frozen, u.gradient_shard, u.gather_trainable,
         u.gather_frozen, u.secondary_trainable, u.secondary_frozen});
  }
  for (const SubGroup& g : pools.placement.sub_groups)
    add({g.master.offset, g.states.offset, g.states_stride});
  for (const UnitPlacement& unit : pools.placement.units) {
    for (const bool trainable : {true, false})
      for (const ParameterPiece& piece : unit.pieces(trainable)) add({piece.place.offset});
  }
  for (const VisitAddresses& v : pools.visits)
    add({v.gradient, v.output, v.output_gradient, v.boundary_stride, v.place.offset});
  add({pools.staging_cast, pools.staging_rounded, pools.staging_norm, pools.staging_exchange,
       pools.staging_sums, pools.staging_gradient, pools.staging_master, pools.evaluation_stride});
  for (const SlotRing& ring : {pools.parameter_slots, pools.gradient_slots, pools.boundary_slots,
                               pools.master_slots, pools.host_work.ring, pools.device_work.ring})
    add({ring.bytes, ring.first.offset});
  for (const Place& place :
       {pools.landing, pools.host_norm, pools.host_gradient, pools.host_master})
    add({place.offset});
  return all;
}

// Every number of a Pools.
std::vector<int64_t> Flat(const Pools& pools) {
  std::vector<int64_t> flat = Addresses(pools);
  for (const auto* bytes : {&pools.bytes, &pools.host_bytes, &pools.file_bytes})
    flat.insert(flat.end(), std::begin(*bytes), std::end(*bytes));
  const auto add = [&](std::initializer_list<int64_t> numbers) {
    flat.insert(flat.end(), numbers);
  };
  for (const SubGroup& g : pools.placement.sub_groups)
    add({static_cast<int64_t>(g.tier), g.unit, g.begin, g.end});
  for (const UnitPlacement& unit : pools.placement.units) {
    add({static_cast<int64_t>(unit.gradient), unit.first_sub_group, unit.sub_groups});
    for (const bool trainable : {true, false}) {
      for (const ParameterPiece& piece : unit.pieces(trainable))
        add({static_cast<int64_t>(piece.place.tier), piece.begin, piece.end});
    }
  }
  for (const WorkSlots& work : {pools.host_work, pools.device_work}) {
    add({work.ring.count, work.master, work.states, work.states_stride, work.gradient,
         work.parameter});
  }
  const auto add_place = [&](const Place& place) {
    add({static_cast<int64_t>(place.tier), static_cast<int64_t>(place.pool), place.per_slice});
  };
  for (const VisitAddresses& v : pools.visits) {
    add({v.leaves ? 1 : 0});
    add_place(v.place);
  }
  for (const SlotRing& ring : {pools.parameter_slots, pools.gradient_slots, pools.boundary_slots,
                               pools.master_slots, pools.host_work.ring, pools.device_work.ring})
    add_place(ring.first);
  for (const Place& place :
       {pools.landing, pools.host_norm, pools.host_gradient, pools.host_master})
    add_place(place);
  add({pools.staging_sums_bytes});
  add({pools.parameter_slots.count, pools.gradient_slots.count, pools.boundary_slots.count,
       pools.master_slots.count, pools.evaluation_micro_batches});
  return flat;
}

// Every other case has something offloaded, every third declares an order.
RandomCase CaseOf(int number) {
  return RandomCase(static_cast<uint64_t>((number + 1) / 2), /*offloads=*/number % 2 == 0,
                    /*orders=*/number % 3 == 0);
}

// That the laws are checked on orders of all kinds.
TEST(RandomOrders, AreOfEveryKind) {
  int declared = 0, nested = 0, recomputed = 0, walks = 0, without_gradients = 0, one_sided = 0;
  for (int seed = 1; seed <= 300; ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/false, /*orders=*/true);
    const ModelSpec& model = random_case.model;
    ASSERT_TRUE(Validate(model).ok()) << Validate(model) << random_case.description();
    declared += !model.order.empty();
    bool nests = false, recomputes = false, walks_again = false, backward_came = false;
    for (const PlannedScope& scope : ScopesOfStep(model, 1)) {
      nests |= scope.close_tick > scope.open_tick + 1;
      recomputes |= scope.recompute;
      backward_came |= scope.backward;
      walks_again |= backward_came && scope.kind() == ScopeKind::kForward;
    }
    nested += nests;
    recomputed += recomputes;
    walks += walks_again;
    for (const Visit& visit : model.forward) {
      without_gradients += !visit.gradients;
      one_sided += !visit.forward || !visit.backward;
    }
  }
  EXPECT_GT(declared, 200);
  EXPECT_GT(nested, 50);
  EXPECT_GT(recomputed, 100);
  EXPECT_GT(walks, 20);
  EXPECT_GT(without_gradients, 50);
  EXPECT_GT(one_sided, 50);
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

// What is there when it is used, and what shares memory never lives at once, on any tier: over
// steps, walks and every variant, one after another, also with looks at the state in between.
TEST(PlanLaws, NothingIsUsedBeforeItIsThereAndNoTwoLiveThingsOverlap) {
  for (int number = 1; number <= Cases(800); ++number) {
    RandomCase random_case = CaseOf(number);
    if (number > Cases(600)) random_case.MixDTypes();
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    ASSERT_FALSE(variants.empty());
    const absl::StatusOr<Plan> drain = PlanDrain(random_case.inputs());
    ASSERT_TRUE(drain.ok()) << drain.status();
    Random random(random_case.seed);
    // The rest are made when they are needed.
    const std::vector<const Plan*> first = {&variants[0].plan, &variants[1].plan, &variants[3].plan,
                                            &*drain};
    Fragments fragments(first);
    Replay replay(random_case.inputs(), variants.front().plan,
                  static_cast<int>(random.Between(0, random_case.world - 1)), fragments, &*drain);
    replay.Step(variants.front().plan);
    replay.Step(variants.front().plan);
    replay.Step(variants.front().plan);
    for (int i = 0; i < 8; ++i) {
      const Variant& variant = variants[random.Between(0, std::ssize(variants) - 1)];
      if (variant.walk) {
        replay.Walk(variant.plan);
      } else {
        replay.Step(variant.plan, {.overflows = random.OneIn(4)});
      }
      if (random.OneIn(4)) replay.Drain();
    }
    ASSERT_EQ(replay.violation(), "");
  }
}

// With secondary shards a step gathers in other groups than a walk does, for which there must be room, too. Found
// by more cases than the test above has.
TEST(PlanLaws, AWalkHasRoomForItsOwnGroups) {
  const RandomCase random_case(458, /*offloads=*/true);
  const PlanInputs inputs = random_case.inputs();
  const absl::StatusOr<Plan> step = PlanStep(inputs), walk = PlanWalk(inputs),
                             drain = PlanDrain(inputs);
  ASSERT_TRUE(step.ok() && walk.ok() && drain.ok());
  ASSERT_TRUE(step->decisions.has_secondary());
  const std::vector<const Plan*> plans = {&*step, &*walk, &*drain};
  Fragments fragments(plans);
  Replay replay(inputs, *step, /*rank=*/0, fragments, &*drain);
  replay.Step(*step);
  replay.Walk(*walk);
  ASSERT_EQ(replay.violation(), "") << random_case.description();
}

// A trainer may leave units out where it keeps the boundaries itself: what waits for their scopes
// does not stand in for what an update waits for.
TEST(PlanLaws, UnitsLeftOutAreUpdatedInOrder) {
  for (int number = 1; number <= Cases(600); ++number) {
    RandomCase random_case = CaseOf(number);
    for (Visit& visit : random_case.model.forward) visit.output_bytes = 0;
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs()),
                               drain = PlanDrain(random_case.inputs());
    ASSERT_TRUE(plan.ok() && drain.ok()) << plan.status() << drain.status();
    Random random(random_case.seed);
    const std::vector<const Plan*> plans = {&*plan, &*drain};
    Fragments fragments(plans);
    Replay replay(random_case.inputs(), *plan, /*rank=*/0, fragments, &*drain);
    for (int i = 0; i < 4; ++i) {
      std::vector<bool> left_out(random_case.model.units.size());
      for (size_t u = 0; u < left_out.size(); ++u) left_out[u] = random.OneIn(2);
      replay.Step(*plan, {.left_out = left_out});
    }
    ASSERT_EQ(replay.violation(), "");
  }
}

// Slots for masters that gathers share with early updates: from none to enough for all.
TEST(PlanLaws, AsManyUnitsShareReadsAsThereAreSlotsFor) {
  constexpr int64_t kUnits = 7, kElements = 4 * kCutElements;
  const ModelSpec model = UnitChain(std::vector<int64_t>(kUnits, kElements));
  for (const int64_t depth : {0, 1, 3}) {
    size_t shared = 0;
    for (int64_t sub_groups = 0; sub_groups <= 20; ++sub_groups) {
      SCOPED_TRACE(testing::Message() << "depth " << depth << ", " << sub_groups << " sub-groups");
      Config config;
      config.compute = DType::kBFloat16;
      config.gradient_accumulation_steps = 1;
      config.gradient_clipping = 0;
      config.ebb.check_overflow = false;
      config.ebb.coalesce_bytes = 0;
      config.ebb.prefetch_depth = depth;
      config.zero.stage = 3;
      config.zero.param_persistence_threshold = 0;
      config.zero.sub_group_size = kCutElements;
      OffloadParamConfig& parameters = config.zero.offload_param;
      parameters.device = config.zero.offload_optimizer.device = Tier::kNvme;
      parameters.max_in_cpu = 0;
      parameters.buffer_count = 4;
      // Of masters: an element is as large as two of parameters.
      parameters.buffer_size = kElements + sub_groups * kCutElements / 2;
      const PlanInputs inputs{
          .model = &model, .config = &config, .world = 1, .optimizer_states = 2};
      const absl::StatusOr<Plan> plan = PlanStep(inputs), drain = PlanDrain(inputs);
      ASSERT_TRUE(plan.ok() && drain.ok()) << plan.status() << drain.status();
      ASSERT_LE(plan->pools.master_slots.count, sub_groups);
      const std::vector<const Plan*> plans = {&*plan, &*drain};
      Fragments fragments(plans);
      Replay replay(inputs, *plan, /*rank=*/0, fragments, &*drain);
      for (int step = 0; step < 3; ++step) replay.Step(*plan);
      ASSERT_EQ(replay.violation(), "");
      size_t copied = 0;
      for (const Operation& operation : plan->operations)
        if (operation.kind == OperationKind::kCastMasters) copied += operation.updates.size();
      ASSERT_GE(copied, shared);
      shared = copied;
      if (sub_groups < 4) {
        ASSERT_EQ(shared, 0u);
      }
    }
    // All but those with updates that the next forward carries, the second of each three.
    ASSERT_EQ(shared, 4u * (kUnits - (kUnits + 1) / 3));
  }
}

TEST(PlanLaws, EveryVariantHasTheSamePools) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    for (const Variant& variant : variants)
      ASSERT_EQ(Flat(variant.plan.pools), Flat(variants.front().plan.pools));
    const absl::StatusOr<Plan> drain = PlanDrain(random_case.inputs());
    ASSERT_TRUE(drain.ok()) << drain.status();
    ASSERT_EQ(Flat(drain->pools), Flat(variants.front().plan.pools));
  }
}

TEST(PlanLaws, AddressesAreAligned) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (int64_t address : Addresses(plan->pools)) ASSERT_EQ(address % kPoolAlignment, 0);
  }
}

// Those that run, of a plan that finds updates carried or not.
std::vector<const Operation*> Running(const Plan& plan, bool carrying) {
  std::vector<const Operation*> running;
  for (const Operation& operation : plan.operations) {
    if (operation.condition != (carrying ? Condition::kNotCarrying : Condition::kCarrying))
      running.push_back(&operation);
  }
  return running;
}

TEST(PlanLaws, MovesGoFromTierToTierAndTransfersAreAligned) {
  const std::map<OperationKind, std::pair<Tier, Tier>> ways = {
      {OperationKind::kRead, {Tier::kNvme, Tier::kCpu}},
      {OperationKind::kUpload, {Tier::kCpu, Tier::kDevice}},
      {OperationKind::kDownload, {Tier::kDevice, Tier::kCpu}},
      {OperationKind::kWrite, {Tier::kCpu, Tier::kNvme}}};
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      for (const Operation& operation : variant.plan.operations) {
        const auto way = ways.find(operation.kind);
        ASSERT_EQ(way == ways.end(), operation.moves.empty());
        int64_t bytes = 0;
        for (const Move& move : operation.moves) {
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

// A config may grant a tier just what the pools take there, and not a page less.
TEST(PlanLaws, PoolsStayWithinWhatTheConfigGrants) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    const int64_t device = BytesOn(Tier::kDevice, *plan), host = BytesOn(Tier::kCpu, *plan);
    const OffloadParamConfig& parameters = random_case.config.zero.offload_param;
    ASSERT_LE(plan->pools.parameter_slots.count, parameters.buffer_count);
    const int64_t buffer_size = parameters.buffer_size.value_or(100'000'000);
    ASSERT_LE(plan->pools.parameter_slots.bytes / SizeOf(random_case.config.compute), buffer_size);
    EbbConfig& ebb = random_case.config.ebb;
    ASSERT_LE(host, ebb.host_memory.value_or(host));
    const SlotRing& masters = plan->pools.master_slots;
    if (masters.count > 0) {
      ASSERT_LE(plan->pools.parameter_slots.count * plan->pools.parameter_slots.bytes +
                    masters.count * masters.bytes,
                parameters.buffer_count * buffer_size * SizeOf(random_case.config.compute));
    }
    ebb.device_memory = device;
    ASSERT_TRUE(PlanStep(random_case.inputs()).ok());
    ebb.device_memory = device - 1;
    const absl::StatusOr<Plan> refused = PlanStep(random_case.inputs());
    ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
    ASSERT_THAT(std::string(refused.status().message()), HasSubstr("ebb.device_memory"));
    ebb.device_memory.reset();
    for (const int64_t budget : {host, host / 2, int64_t{0}}) {
      ebb.host_memory = budget;
      const absl::StatusOr<Plan> granted = PlanStep(random_case.inputs());
      if (granted.ok()) {
        ASSERT_LE(BytesOn(Tier::kCpu, *granted), budget);
      } else {
        ASSERT_LT(budget, host);
        ASSERT_EQ(granted.status().code(), absl::StatusCode::kResourceExhausted);
        ASSERT_THAT(std::string(granted.status().message()), HasSubstr("ebb.host_memory"));
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
        for (int index : moment.operations()) {
          ASSERT_EQ(index, issued);
          ++issued;
        }
      }
      ASSERT_EQ(issued, std::ssize(plan.operations));
    }
  }
}

TEST(PlanLaws, EveryScopesGradientIsReducedOnceARoundOrOnceAStep) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const bool at_step = !random_case.config.reduces_at_round();
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      std::map<int, int> reductions;  // by scope
      for (int i = 0; i < std::ssize(plan.operations); ++i) {
        if (plan.operations[i].kind != OperationKind::kReduce) continue;
        for (const Part& part : plan.operations[i].parts) {
          ASSERT_EQ(plan.scopes[part.scope].unit, part.unit);
          ++reductions[part.scope];
        }
      }
      for (int s = 0; s < std::ssize(plan.scopes); ++s) {
        const PlannedScope& scope = plan.scopes[s];
        const bool reduces = scope.backward &&
                             IsTrainable(random_case.model, static_cast<UnitId>(scope.unit)) &&
                             random_case.model.forward[scope.visit].gradients &&
                             (!at_step || scope.round == plan.decisions.rounds - 1);
        ASSERT_EQ(reductions[s], reduces ? 1 : 0) << "scope " << s;
      }
    }
  }
}

// With the updates that were carried into it, and without those that it carries on.
TEST(PlanLaws, EverySubGroupIsUpdatedOnceAndRefreshedWhereItsUnitIsKeptWholeInSlices) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      const Plan& plan = variant.plan;
      const bool carries = plan.decisions.carries();
      const std::vector<SubGroup>& sub_groups = plan.pools.placement.sub_groups;
      std::vector<int> updates(sub_groups.size()), refreshes(plan.layout.units.size());
      for (const Operation* operation : Running(plan, /*carrying=*/carries)) {
        for (const Part& part : operation->parts) {
          if (operation->kind == OperationKind::kUpdate)
            ++updates[operation->updates.front().sub_group];
          if (operation->kind == OperationKind::kRefresh) ++refreshes[part.unit];
        }
      }
      for (size_t g = 0; g < updates.size(); ++g)
        ASSERT_EQ(updates[g], variant.walk ? 0 : 1) << "sub-group " << g;
      for (int u = 0; u < std::ssize(plan.layout.units); ++u) {
        const bool is_updated =
            !variant.walk && IsTrainable(random_case.model, static_cast<UnitId>(u));
        const bool is_refreshed = is_updated && random_case.shards() > 1 &&
                                  random_case.config.zero.stage > 0 && plan.decisions.kept_whole[u];
        ASSERT_EQ(refreshes[u], is_refreshed ? 1 : 0) << "unit " << u;
        // Sub-groups tile what this rank updates, and begin where the file may be cut.
        int64_t end = 0;
        const UnitPlacement& placement = plan.pools.placement.units[u];
        for (int g = placement.first_sub_group;
             g < placement.first_sub_group + placement.sub_groups; ++g) {
          ASSERT_EQ(sub_groups[g].begin, end);
          ASSERT_EQ(sub_groups[g].begin % kCutElements, 0);
          end = sub_groups[g].end;
        }
        const Section& section = plan.layout.units[u].trainable;
        ASSERT_EQ(end, plan.decisions.stage == 0 ? section.elements : section.shard);
      }
    }
  }
}

TEST(PlanLaws, EachKindOfOperationHasItsStream) {
  using enum StreamId;
  const std::map<OperationKind, std::set<StreamId>> streams = {
      {OperationKind::kMark, {kCompute}},
      {OperationKind::kGather, {kGather}},
      {OperationKind::kFillSecondary, {kGather}},
      {OperationKind::kGatherSecondary, {kGather}},
      {OperationKind::kRefresh, {kGather}},
      {OperationKind::kCast, {kReduce}},
      {OperationKind::kReduce, {kReduce}},
      {OperationKind::kAllReduce, {kReduce}},
      {OperationKind::kRound, {kReduce}},
      // Of gradients that live in host memory: kHostSum.
      {OperationKind::kAccumulate, {kReduce, kHostSum}},
      {OperationKind::kNorm, {kReduce, kHostSum}},
      {OperationKind::kGatherGradient, {kReduce}},
      {OperationKind::kSeal, {kReduce}},
      {OperationKind::kExchange, {kReduce}},
      {OperationKind::kConclude, {kReduce}},
      {OperationKind::kParameterNorms, {kUpdate, kHostUpdate}},
      {OperationKind::kSealNorms, {kReduce}},
      {OperationKind::kExchangeNorms, {kReduce}},
      {OperationKind::kConcludeNorms, {kReduce}},
      {OperationKind::kCopyControl, {kReduce}},
      {OperationKind::kUpdate, {kUpdate, kHostUpdate}},
      {OperationKind::kRead, {kReadParameters, kReadStates}},
      {OperationKind::kCastMasters, {kReadParameters}},
      {OperationKind::kUpload, {kUpload}},
      {OperationKind::kDownload, {kDownload}},
      {OperationKind::kWrite, {kWrite}},
      {OperationKind::kCheck, {kCheck}}};
  for (int number = 1; number <= Cases(200); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    for (const Variant& variant : Variants(random_case)) {
      for (const Operation& operation : variant.plan.operations) {
        ASSERT_TRUE(streams.at(operation.kind).contains(operation.stream));
        if (operation.kind != OperationKind::kUpdate &&
            operation.kind != OperationKind::kParameterNorms)
          continue;
        const SubGroup& group =
            variant.plan.pools.placement.sub_groups[operation.updates.front().sub_group];
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
      for (size_t i = 0; i < plan.operations.size(); ++i) {
        const Operation& operation = plan.operations[i];
        const bool fill = operation.kind == OperationKind::kFillSecondary;
        const bool from_secondary = operation.kind == OperationKind::kGatherSecondary;
        if (!fill && !from_secondary && operation.kind != OperationKind::kGather) continue;
        ASSERT_TRUE(has_secondary || operation.kind == OperationKind::kGather);
        // Right behind its gather. It keeps parts of some units of the gather.
        ASSERT_TRUE(!fill || plan.operations[i - 1].kind == OperationKind::kGather);
        for (const Part& part : operation.parts) {
          const size_t unit = static_cast<size_t>(part.unit);
          if (fill) {
            ++fills[unit];
            ASSERT_TRUE(std::any_of(plan.operations[i - 1].parts.begin(),
                                    plan.operations[i - 1].parts.end(),
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

// Clipping, overflow checks, norms of parameters and held updates need all gradients before the first update.
TEST(PlanLaws, UpdatesStartUnderBackwardOnlyWhereNothingNeedsAllGradientsFirst) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const Config& config = random_case.config;
    for (bool hold : {false, true}) {
      const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs(), 0, hold);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const bool norms = random_case.TakesNorms();
      const bool early = !hold && !norms && config.gradient_clipping == 0 &&
                         !config.checks_overflow() &&
                         config.ebb.asynchronous_step == AsynchronousStep::kAuto;
      ASSERT_EQ(plan->decisions.timing == UpdateTiming::kEarly, early);
      bool exchanged = false, norms_exchanged = !norms;
      for (const Operation& operation : plan->operations) {
        exchanged |= operation.kind == OperationKind::kConclude;
        norms_exchanged |= operation.kind == OperationKind::kConcludeNorms;
        // Carried updates are the step before's.
        if (operation.condition == Condition::kCarrying) continue;
        ASSERT_TRUE(operation.kind != OperationKind::kUpdate || exchanged == !early);
        ASSERT_TRUE(operation.kind != OperationKind::kUpdate || norms_exchanged);
        ASSERT_TRUE(operation.kind != OperationKind::kParameterNorms || exchanged);
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
void PrintTo(const AheadCase& ahead, std::ostream* out) {
  *out << ahead.name;
}
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
  for (int index : plan->moments.front().operations())
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
