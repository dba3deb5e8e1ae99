// What happens in memory when an engine runs plans of random models, one after another.
#include <gtest/gtest.h>

#include <vector>

#include "ebb/sharding/declared_order.h"
#include "plan_variants.h"
#include "replay.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_replay_test {
namespace {

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

// Data is there when it is used, and data in shared memory never lives at once, on any tier: over
// steps, walks and every variant, one after another, also with reads of the state in between.
TEST(PlanLaws, NothingIsReadBeforeItIsWrittenAndLiveMemoryDoesNotOverlap) {
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

// With secondary shards a step gathers in other groups than a walk does, and there must be room for
// these too. Found by more cases than the test above has.
TEST(PlanLaws, TheGroupsOfAnEvaluationFitInThePool) {
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

// A trainer that keeps the boundaries itself may leave units out. A wait of their scopes does not
// replace a wait of an update.
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
      // Of masters: an element is as large as two elements of parameters.
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

}  // namespace
}  // namespace ebb::sharding::plan_replay_test
