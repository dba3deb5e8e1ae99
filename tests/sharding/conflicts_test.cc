#include "ebb/sharding/conflicts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/residency.h"
#include "random_model.h"
#include "unit_chain.h"

namespace ebb::sharding {
namespace {

using Pairs = std::set<std::pair<int, int>>;

// Of units each gathered and reduced on its own.
Config ConfigOf(int stage, int64_t prefetch_depth) {
  Config config;
  config.zero.stage = stage;
  config.gradient_accumulation_steps = 1;
  config.zero.param_persistence_threshold = 0;
  config.zero.reduce_bucket_size = 1;
  config.ebb.coalesce_bytes = 0;
  config.ebb.prefetch_depth = prefetch_depth;
  return config;
}

Plan PlanOf(const ModelSpec& model, const Config& config) {
  absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : Plan{};
}

Pairs GatherConflicts(const Plan& plan) {
  const int units = static_cast<int>(plan.layout.units.size());
  Pairs pairs;
  for (int a = 0; a < units; ++a) {
    EXPECT_FALSE(GathersConflict(plan, a, a));
    for (int b = a + 1; b < units; ++b) {
      EXPECT_EQ(GathersConflict(plan, a, b), GathersConflict(plan, b, a));
      if (GathersConflict(plan, a, b)) pairs.insert({a, b});
    }
  }
  return pairs;
}

// Of operations, as the engine has it when the trainer opens scopes and closes none from `held` on.
std::vector<uint8_t> IssuedWhileHeld(const Plan& plan, int held) {
  std::vector<uint8_t> issued(plan.operations.size(), 0);
  const Moment& open = plan.moments[static_cast<size_t>(OpenTick(held))];
  std::fill(issued.begin(), issued.begin() + open.end, uint8_t{1});
  return issued;
}

std::vector<int> NeedsOf(const Plan& plan, const std::vector<uint8_t>& issued, int operation) {
  std::vector<int> needs;
  FindNeeds(plan, issued, CarriedOperations(plan), operation, needs);
  return needs;
}

TEST(Conflicts, OfGathersAreOfUnitsThatTakeTurns) {
  const ModelSpec model = UnitChain({64, 64, 64, 64, 64});
  EXPECT_EQ(GatherConflicts(PlanOf(model, ConfigOf(3, 0))).size(), 10u) << "all with all";
  const Pairs one_ahead = GatherConflicts(PlanOf(model, ConfigOf(3, 1)));
  for (int unit = 0; unit + 1 < 5; ++unit) EXPECT_FALSE(one_ahead.contains({unit, unit + 1}));
  EXPECT_TRUE(one_ahead.contains({0, 2}));
  for (const auto& [a, b] : GatherConflicts(PlanOf(model, ConfigOf(3, 2)))) EXPECT_GT(b - a, 2);
  EXPECT_TRUE(GatherConflicts(PlanOf(model, ConfigOf(3, INT64_MAX))).empty());
  EXPECT_TRUE(GatherConflicts(PlanOf(model, ConfigOf(2, 0))).empty()) << "all are kept whole";
}

TEST(Conflicts, OfGathersAreOfEitherSection) {
  Plan plan;
  plan.decisions.compute = DType::kFloat32;
  plan.decisions.kept_whole = {false, false, false, true};
  plan.layout.units.resize(4);
  plan.pools.units.resize(4);
  const auto place = [&](size_t unit, int64_t at, int64_t trainable, int64_t frozen) {
    plan.layout.units[unit].trainable.elements = trainable;
    plan.layout.units[unit].frozen.elements = frozen;
    plan.pools.units[unit].gather_trainable = at;
    plan.pools.units[unit].gather_frozen = at + 4 * trainable;
  };
  place(0, 0, 64, 10);  // bytes 0 to 296
  place(1, 256, 5, 0);  // 256 to 276, of the frozen section
  place(2, 296, 8, 8);
  place(3, 0, 100, 100);
  EXPECT_EQ(GatherMemory(plan, 0), (std::pair<int64_t, int64_t>(0, 296)));
  EXPECT_EQ(GatherConflicts(plan), (Pairs{{0, 1}}));
}

TEST(Conflicts, OfGradientsAreOfTheirBytesUntilTheyAreReduced) {
  Plan plan;
  plan.decisions.gradient = DType::kBFloat16;
  plan.decisions.trainable = {true, true, false};
  plan.layout.units.resize(3);
  plan.layout.units[0].trainable.elements = 100;
  plan.layout.units[1].trainable.elements = 50;
  plan.pools.visits.resize(4);
  plan.pools.visits[1].gradient = 200;
  plan.pools.visits[2].gradient = 100;
  const PlannedScope first{.visit = 0, .unit = 0}, behind{.visit = 1, .unit = 0},
      across{.visit = 2, .unit = 1}, frozen{.visit = 3, .unit = 2};
  EXPECT_EQ(GradientMemory(plan, across), (std::pair<int64_t, int64_t>(100, 200)));
  EXPECT_FALSE(GradientsConflict(plan, first, behind));
  EXPECT_TRUE(GradientsConflict(plan, first, across));
  EXPECT_TRUE(GradientsConflict(plan, across, first));
  EXPECT_FALSE(GradientsConflict(plan, across, behind));
  EXPECT_FALSE(GradientsConflict(plan, first, frozen)) << "which nothing writes";
  EXPECT_FALSE(GradientsConflict(plan, frozen, first));
  EXPECT_TRUE(GradientsConflict(plan, first, first)) << "a second one replaces it";
  plan.decisions.keeps_step_gradients = true;
  EXPECT_FALSE(GradientsConflict(plan, first, first)) << "a second one is added to it";
  EXPECT_TRUE(GradientsConflict(plan, first, across));
}

TEST(Conflicts, OfGradientsEndWithTheirReduction) {
  ModelSpec model = UnitChain({64, 64, 64, 64, 64, 64});
  model.parameters[3].trainable = false;
  const Plan plan = PlanOf(model, ConfigOf(2, 1));
  ASSERT_EQ(plan.scopes.size(), 12u);
  // Backward of units 5 to 0 is scopes 6 to 11. A gradient keeps its memory for one scope more.
  std::vector<uint8_t> issued(plan.operations.size(), 0);
  EXPECT_EQ(UnreducedInTheWay(plan, issued, 7), -1) << "beside the one before";
  EXPECT_EQ(UnreducedInTheWay(plan, issued, 8), -1) << "frozen, writes none";
  EXPECT_EQ(UnreducedInTheWay(plan, issued, 9), 7);
  issued[static_cast<size_t>(plan.reduce_of_scope[7])] = 1;
  EXPECT_EQ(UnreducedInTheWay(plan, issued, 9), -1);
}

// Of 7 units on NVMe, whose parameters pass through few slots.
Plan PlanOnNvme(UpdateTiming timing, bool stochastic_rounding) {
  const ModelSpec model = UnitChain({64, 64, 64, 64, 64, 64, 64});
  Config config = ConfigOf(3, 2);
  config.compute = DType::kBFloat16;
  config.ebb.stochastic_rounding = stochastic_rounding;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.offload_param.buffer_count = 1;
  if (timing == UpdateTiming::kEarly) {
    config.gradient_clipping = 0;
    config.ebb.check_overflow = false;
  }
  Plan plan = PlanOf(model, config);
  EXPECT_EQ(plan.decisions.timing, timing);
  return plan;
}

TEST(Conflicts, OfSlotsAreWithEarlyUpdatesOfScopesThatAreOpen) {
  const Plan plan = PlanOnNvme(UpdateTiming::kEarly, /*stochastic_rounding=*/false);
  // Backward of units 6 to 0 is scopes 7 to 13. Masters that unit 5's gather has read wait in a slot
  // for its update, which scope 8 holds back.
  std::vector<uint8_t> issued = IssuedWhileHeld(plan, 8);
  bool taken = false;
  for (int scope = 9; scope < 14; ++scope) {
    const int gather = plan.gather_of_scope[static_cast<size_t>(scope)];
    if (issued[static_cast<size_t>(gather)]) continue;
    const std::vector<int> needs = NeedsOf(plan, issued, gather);
    taken |= TakesHeldSlot(plan, issued, needs);
    for (int operation : needs) {
      EXPECT_NE(plan.operations[static_cast<size_t>(operation)].kind, OperationKind::kUpdate);
      issued[static_cast<size_t>(operation)] = 1;
    }
  }
  EXPECT_TRUE(taken);

  // Late ones wait for no scope.
  const Plan late = PlanOnNvme(UpdateTiming::kLate, /*stochastic_rounding=*/false);
  for (int held = 0; held < 14; ++held) {
    issued = IssuedWhileHeld(late, held);
    for (int scope = held + 1; scope < 14; ++scope) {
      const int gather = late.gather_of_scope[static_cast<size_t>(scope)];
      const std::vector<int> needs = NeedsOf(late, issued, gather);
      EXPECT_FALSE(TakesHeldSlot(late, issued, needs));
      for (int operation : needs) issued[static_cast<size_t>(operation)] = 1;
    }
  }
}

// What has been read for a scope that is left out is still in its slot.
TEST(Conflicts, OfSlotsAreWithScopesLeftOutBehindOneThatIsOpen) {
  const Plan plan = PlanOnNvme(UpdateTiming::kLate, /*stochastic_rounding=*/false);
  const std::vector<uint8_t> issued = IssuedWhileHeld(plan, 0);
  bool taken = false;
  for (int scope = 2; scope < 7; ++scope) {
    const int gather = plan.gather_of_scope[static_cast<size_t>(scope)];
    taken |= TakesHeldSlot(plan, issued, NeedsOf(plan, issued, gather));
  }
  EXPECT_TRUE(taken);
}

TEST(Conflicts, NeedsOfAGatherAreAlsoTheUpdatesCarriedUpToIt) {
  const Plan plan = PlanOnNvme(UpdateTiming::kLate, /*stochastic_rounding=*/true);
  const std::vector<uint8_t> issued = IssuedWhileHeld(plan, 0);
  const int gather = plan.gather_of_scope[5];
  const std::vector<int> needs = NeedsOf(plan, issued, gather);
  EXPECT_TRUE(std::is_sorted(needs.begin(), needs.end()));
  EXPECT_EQ(needs.back(), gather);
  std::set<int> updated;
  for (int operation : needs) {
    const Operation& o = plan.operations[static_cast<size_t>(operation)];
    if (o.kind == OperationKind::kUpdate) updated.insert(o.parts.front().unit);
  }
  EXPECT_TRUE(updated.contains(5));
  for (int i = 0; i < gather; ++i) {
    if (plan.operations[static_cast<size_t>(i)].condition != Condition::kCarrying) continue;
    EXPECT_NE(issued[static_cast<size_t>(i)] != 0,
              std::binary_search(needs.begin(), needs.end(), i))
        << i;
  }
}

// The definitions, as slow as they can be.

bool Meet(int64_t a, int64_t a_bytes, int64_t b, int64_t b_bytes) {
  for (int64_t byte : {a, b}) {
    if (byte >= a && byte < a + a_bytes && byte >= b && byte < b + b_bytes) return true;
  }
  return false;
}

bool SectionsMeet(const Plan& plan, int a, int b) {
  const int64_t size = SizeOf(plan.decisions.compute);
  const auto sections = [&](int unit) {
    const UnitAddresses& at = plan.pools.units[static_cast<size_t>(unit)];
    const UnitLayout& layout = plan.layout.units[static_cast<size_t>(unit)];
    return std::vector<std::pair<int64_t, int64_t>>{
        {at.gather_trainable, layout.trainable.elements * size},
        {at.gather_frozen, layout.frozen.elements * size}};
  };
  for (const auto& [x, x_bytes] : sections(a)) {
    for (const auto& [y, y_bytes] : sections(b))
      if (Meet(x, x_bytes, y, y_bytes)) return true;
  }
  return false;
}

bool FillsSecondary(const Plan& plan, int operation) {
  return plan.operations[static_cast<size_t>(operation)].kind == OperationKind::kFillSecondary;
}

// Grows until nothing is missing.
std::vector<int> NeedsByDefinition(const Plan& plan, const std::vector<uint8_t>& issued,
                                   int operation) {
  std::set<int> needs = {operation};
  for (int i = 0; i < operation; ++i) {
    if (!issued[static_cast<size_t>(i)] &&
        plan.operations[static_cast<size_t>(i)].condition == Condition::kCarrying)
      needs.insert(i);
  }
  // A gather and what it fills are issued together.
  const auto insert_pair = [&](int need) {
    const int next = need + 1;
    if (next < std::ssize(plan.operations) && FillsSecondary(plan, next) &&
        !issued[static_cast<size_t>(next)])
      needs.insert(next);
    if (FillsSecondary(plan, need) && !issued[static_cast<size_t>(need - 1)])
      needs.insert(need - 1);
  };
  for (size_t before = 0; before != needs.size();) {
    before = needs.size();
    for (int need : std::vector<int>(needs.begin(), needs.end())) {
      insert_pair(need);
      for (const Dependency& dependency : plan.operations[static_cast<size_t>(need)].after) {
        if (dependency.kind != Dependency::kOperation) continue;
        const Operation& o = plan.operations[static_cast<size_t>(dependency.index)];
        if (!issued[static_cast<size_t>(dependency.index)] &&
            (o.kind != OperationKind::kMark || o.of_update))
          needs.insert(dependency.index);
      }
    }
  }
  return {needs.begin(), needs.end()};
}

bool TakenByDefinition(const Plan& plan, const std::vector<uint8_t>& issued,
                       const std::vector<int>& operations) {
  std::set<std::pair<int, int>> held;  // slot, update
  for (int i = 0; i < static_cast<int>(plan.operations.size()); ++i) {
    const Operation& o = plan.operations[static_cast<size_t>(i)];
    if (issued[static_cast<size_t>(i)] || o.condition != Condition::kAlways ||
        std::count(operations.begin(), operations.end(), i) > 0)
      continue;
    for (int slot : o.frees) held.insert({slot, i});
  }
  return std::any_of(operations.begin(), operations.end(), [&](int operation) {
    return std::any_of(held.begin(), held.end(), [&](const auto& slot_and_update) {
      const auto& [slot, update] = slot_and_update;
      const std::span<const Dependency> after =
          plan.operations[static_cast<size_t>(operation)].after;
      return update < operation &&
             std::find(after.begin(), after.end(), Dependency{Dependency::kSlotFree, slot}) !=
                 after.end();
    });
  });
}

TEST(Conflicts, AreWhatTheirDefinitionsSay) {
  int conflicts = 0, taken = 0;
  for (int seed = 1; seed <= Cases(120); ++seed) {
    const RandomCase c(static_cast<uint64_t>(seed), /*offloads=*/seed % 3 > 0);
    SCOPED_TRACE(c.description());
    const absl::StatusOr<Plan> plan = PlanStep(c.inputs());
    if (!plan.ok() || plan->scopes.size() > 100) continue;
    const Decisions& d = plan->decisions;
    const int units = static_cast<int>(plan->layout.units.size());
    for (int a = 0; a < units; ++a) {
      for (int b = 0; b < units; ++b) {
        const bool meet =
            a != b && !d.kept_whole[a] && !d.kept_whole[b] && SectionsMeet(*plan, a, b);
        ASSERT_EQ(GathersConflict(*plan, a, b), meet) << a << " and " << b;
        conflicts += meet;
      }
    }
    const auto bytes = [&](const PlannedScope& scope) {
      return plan->layout.units[static_cast<size_t>(scope.unit)].trainable.elements *
             SizeOf(d.gradient);
    };
    for (const PlannedScope& a : plan->scopes) {
      for (const PlannedScope& b : plan->scopes) {
        const bool meet = Meet(plan->pools.visits[static_cast<size_t>(a.visit)].gradient, bytes(a),
                               plan->pools.visits[static_cast<size_t>(b.visit)].gradient, bytes(b));
        ASSERT_EQ(GradientsConflict(*plan, a, b),
                  meet && !(d.keeps_step_gradients && a.visit == b.visit))
            << "visits " << a.visit << " and " << b.visit;
      }
    }
    Random random(static_cast<uint64_t>(seed));
    for (int n = 0; n < 20; ++n) {
      std::vector<uint8_t> issued =
          IssuedWhileHeld(*plan, static_cast<int>(random.Between(0, std::ssize(plan->scopes) - 1)));
      for (uint8_t& one : issued) one |= random.OneIn(5) ? 1 : 0;
      const int operation = static_cast<int>(random.Between(0, std::ssize(issued) - 1));
      if (plan->operations[static_cast<size_t>(operation)].kind == OperationKind::kMark) continue;
      issued[static_cast<size_t>(operation)] = 0;
      const std::vector<int> needs = NeedsOf(*plan, issued, operation);
      ASSERT_EQ(needs, NeedsByDefinition(*plan, issued, operation)) << operation;
      const bool takes = TakenByDefinition(*plan, issued, needs);
      ASSERT_EQ(TakesHeldSlot(*plan, issued, needs), takes) << operation;
      taken += takes;
    }
  }
  EXPECT_GT(conflicts, 0);
  EXPECT_GT(taken, 0);
}

TEST(Conflicts, ThereAreNoneInTheDeclaredOrder) {
  for (int seed = 1; seed <= Cases(120); ++seed) {
    const RandomCase c(static_cast<uint64_t>(seed), /*offloads=*/seed % 3 > 0);
    SCOPED_TRACE(c.description());
    const absl::StatusOr<Plan> plan = PlanStep(c.inputs());
    if (!plan.ok() || plan->scopes.size() > 100) continue;
    std::vector<uint8_t> issued(plan->operations.size(), 0);
    for (const Moment& moment : plan->moments) {
      for (int i : moment.operations()) {
        const Operation& o = plan->operations[static_cast<size_t>(i)];
        if (o.kind == OperationKind::kGather) {
          const std::vector<int> needs = NeedsOf(*plan, issued, i);
          const bool fills = FillsSecondary(*plan, i + 1);
          ASSERT_EQ(needs, fills ? (std::vector<int>{i, i + 1}) : std::vector<int>{i});
          ASSERT_FALSE(TakesHeldSlot(*plan, issued, needs)) << i;
        }
        issued[static_cast<size_t>(i)] = 1;
      }
      ASSERT_EQ(NotIssued(*plan, issued, moment.compute), -1);
      if (moment.kind != Moment::kOpen) continue;
      const PlannedScope& opened = plan->scopes[static_cast<size_t>(moment.scope)];
      if (opened.backward) {
        ASSERT_EQ(UnreducedInTheWay(*plan, issued, moment.scope), -1);
      }
      // Gathered already, and used now or later.
      for (size_t s = static_cast<size_t>(moment.scope); s < plan->scopes.size(); ++s) {
        const int gather = plan->gather_of_scope[s];
        if (gather < 0 || !issued[static_cast<size_t>(gather)]) continue;
        ASSERT_FALSE(GathersConflict(*plan, opened.unit, plan->scopes[s].unit)) << s;
      }
    }
  }
}

}  // namespace
}  // namespace ebb::sharding
