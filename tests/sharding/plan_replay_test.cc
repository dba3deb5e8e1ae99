// Contents of memory when an engine runs plans of random models, one after another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/plan_table.h"
#include "ebb/sharding/report/traffic.h"
#include "ebb/sharding/scopes.h"
#include "plan_variants.h"
#include "random_model.h"
#include "replay.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_replay_test {
namespace {

using ::testing::Each;

// The laws are checked on orders of all kinds.
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
    if (number > Cases(600)) {
      random_case.MixDTypes();
    } else if (number > Cases(520)) {
      random_case.UpdateMatrices();
    } else if (number > Cases(450)) {
      random_case.EncodeStates();
    }
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    ASSERT_FALSE(variants.empty());
    ASSERT_OK_AND_ASSIGN(const Plan drain, PlanDrain(random_case.inputs()));
    Random random(random_case.seed);
    // The rest are made when they are needed.
    const std::vector<const Plan*> first = {&variants[0].plan, &variants[1].plan, &variants[3].plan,
                                            &drain};
    OpLists lists(first);
    Replay replay(random_case.inputs(), variants.front().plan,
                  static_cast<int>(random.Between(0, random_case.world - 1)), lists, &drain);
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

// With tensor ranks beside the world, records have the squares of units that are whole over tensor,
// and gradients that are terms are added up once a step, in the finished shards.
TEST(PlanLaws, SquaresThatAreComparedComeWithTheRecords) {
  int compared = 0, summed = 0;
  for (int number = 1; number <= Cases(100); ++number) {
    RandomCase random_case = CaseOf(number);
    Random random(random_case.seed);
    for (const UnitSpec& unit : random_case.model.units) {
      const bool whole = random.OneIn(2), sums = whole && random.OneIn(2);
      for (const ParameterId id : unit.parameters) {
        ParameterSpec& parameter = random_case.model.parameters[static_cast<size_t>(id)];
        parameter.over_tensor = whole ? OverTensor::kWhole : OverTensor::kLocal;
        parameter.sums_gradient = sums;
      }
    }
    // Terms on their way from the device to an update on the host need slots there.
    random_case.config.ebb.host_memory = std::nullopt;
    PlanInputs inputs = random_case.inputs();
    inputs.verdict_ranks = 2 * random_case.world;
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan step, PlanStep(inputs));
    ASSERT_OK_AND_ASSIGN(const Plan walk, PlanWalk(inputs));
    ASSERT_OK_AND_ASSIGN(const Plan drain, PlanDrain(inputs));
    compared += !step.decisions.compared.empty();
    int64_t terms = 0;  // bytes of one rank's
    for (int u = 0; u < std::ssize(step.layout.units); ++u) {
      if (step.decisions.sums_tensor[u])
        terms += step.layout.units[u].trainable.shard * SizeOf(step.decisions.shard_dtype(u));
    }
    EXPECT_EQ(step.BytesOf(Role::kSumTensor), terms);  // two ranks, each half of it twice
    summed += terms > 0;
    const int64_t of_rank = kExchangeBytes + 8 * std::ssize(step.decisions.compared);
    EXPECT_EQ(step.BytesOf(Role::kExchange), (inputs.verdict_ranks - 1) * of_rank);
    const std::vector<const Plan*> plans = {&step, &walk, &drain};
    OpLists lists(plans);
    Replay replay(inputs, step, /*rank=*/0, lists, &drain);
    for (int i = 0; i < 2; ++i) {
      replay.Step(step);
      replay.Walk(walk);
    }
    ASSERT_EQ(replay.violation(), "");
  }
  EXPECT_GT(compared, 50);
  EXPECT_GT(summed, 25);
}

// With secondary shards a step gathers in other groups than a walk does, and there must be room for
// these too. Found by more cases than the test above has.
TEST(PlanLaws, TheGroupsOfAnEvaluationFitInThePool) {
  const RandomCase random_case(458, /*offloads=*/true);
  const PlanInputs inputs = random_case.inputs();
  const absl::StatusOr<Plan> step = PlanStep(inputs), walk = PlanWalk(inputs),
                             drain = PlanDrain(inputs);
  ASSERT_OK(step);
  ASSERT_OK(walk);
  ASSERT_OK(drain);
  ASSERT_TRUE(step->decisions.has_secondary());
  const std::vector<const Plan*> plans = {&*step, &*walk, &*drain};
  OpLists lists(plans);
  Replay replay(inputs, *step, /*rank=*/0, lists, &*drain);
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
    OpLists lists(plans);
    Replay replay(random_case.inputs(), *plan, /*rank=*/0, lists, &*drain);
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
      SCOPED_TRACE(::testing::Message()
                   << "depth " << depth << ", " << sub_groups << " sub-groups");
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
      // Room for masters: an element is as large as two elements of parameters.
      parameters.buffer_size = kElements + sub_groups * kCutElements / 2;
      const PlanInputs inputs{
          .model = &model, .config = &config, .world = 1, .optimizer_states = 2};
      const absl::StatusOr<Plan> plan = PlanStep(inputs), drain = PlanDrain(inputs);
      ASSERT_TRUE(plan.ok() && drain.ok()) << plan.status() << drain.status();
      const int masters = plan->table.Find(Purpose::kMasterSlot);
      ASSERT_LE(masters < 0 ? 0 : plan->table[masters].turns, sub_groups);
      const std::vector<const Plan*> plans = {&*plan, &*drain};
      OpLists lists(plans);
      Replay replay(inputs, *plan, /*rank=*/0, lists, &*drain);
      for (int step = 0; step < 3; ++step) replay.Step(*plan);
      ASSERT_EQ(replay.violation(), "");
      size_t copied = 0;
      for (const Op& operation : plan->ops)
        if (operation.role == Role::kCastMasters) copied += operation.updates.size();
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

// Plans of many rounds: three of them are planned.

// An operation without its place in the step.
struct Shown {
  Role role{};
  StreamId stream{};
  bool carried = false, divides = false, goes_on = false;
  std::optional<DType> via;
  int scope = -1;  // of its round
  int64_t bytes = 0;
  std::vector<Operand> operands;
  std::vector<std::pair<int, int>> parts;  // units and sub-groups
  friend bool operator==(const Shown&, const Shown&) = default;
};

struct ShownMoment {
  Moment::Kind kind{};
  int scope = -1;  // of its round
  std::vector<Shown> ops;
  friend bool operator==(const ShownMoment&, const ShownMoment&) = default;
};

// By round. The first also has the step's begin, and the last its end.
std::vector<std::vector<ShownMoment>> RoundsOf(const Plan& plan, bool carrying) {
  const OpList list = ListOf(plan, carrying);
  const int per_round = static_cast<int>(plan.scopes.size()) / plan.decisions.rounds;
  const auto in_round = [&](int scope) { return scope < 0 ? scope : scope % per_round; };
  std::vector<std::vector<ShownMoment>> rounds(static_cast<size_t>(plan.decisions.rounds));
  for (size_t m = 0; m < list.moments.size(); ++m) {
    const Moment& moment = list.moments[m];
    const size_t number = m == 0 ? 0 : (m - 1) / static_cast<size_t>(2 * per_round);
    ShownMoment shown{.kind = moment.kind, .scope = in_round(moment.scope), .ops = {}};
    for (int i = moment.begin; i < moment.end; ++i) {
      const Op& from = list.ops[static_cast<size_t>(i)];
      Shown to{.role = from.role,
               .stream = from.stream,
               .carried = from.carried(),
               .divides = from.divides,
               .goes_on = from.goes_on,
               .via = from.via,
               .scope = in_round(from.scope),
               .bytes = from.bytes,
               .operands = {from.operands.begin(), from.operands.end()},
               .parts = {}};
      for (const Part& part : from.parts) to.parts.emplace_back(part.unit, -1);
      for (const UpdateDetail& update : from.updates) to.parts.emplace_back(-1, update.sub_group);
      shown.ops.push_back(std::move(to));
    }
    rounds[std::min(number, rounds.size() - 1)].push_back(std::move(shown));
  }
  return rounds;
}

// A round finds everything where the round before has left it, in the same places. So the second of
// three stands for any number.
TEST(PlanOfRounds, TheSecondOfThreeStandsForAllBetweenTheFirstAndTheLast) {
  int cases = 0;
  for (int number = 1; number <= Cases(400); ++number) {
    RandomCase random(static_cast<uint64_t>(number), /*offloads=*/number % 2 == 0,
                      /*orders=*/number % 3 == 0);
    SCOPED_TRACE(random.description());
    const int64_t of_round = random.config.ebb.micro_batches_per_round;
    if (random.config.gradient_accumulation_steps == of_round) continue;
    ++cases;
    for (const bool holds : {false, true}) {
      const absl::StatusOr<Plan> three = PlanStep(random.inputs(), 64, holds),
                                 six = PlanUnrolledStep(random.inputs(), 6, holds);
      ASSERT_OK(three);
      ASSERT_OK(six);
      ASSERT_EQ(three->decisions.rounds, 3);
      for (const bool carrying : {false, true}) {
        const auto planned = RoundsOf(*three, carrying), unrolled = RoundsOf(*six, carrying);
        ASSERT_TRUE(planned.front() == unrolled.front());
        for (size_t round = 1; round < 5; ++round)
          ASSERT_TRUE(planned[1] == unrolled[round]) << "round " << round;
        ASSERT_TRUE(planned.back() == unrolled.back());
      }
      for (const Role kind : {Role::kGather, Role::kReduce})
        EXPECT_EQ(three->BytesOf(kind, 6), six->BytesOf(kind));
      const std::vector<TrafficRow> traffic = PredictTraffic(*three, true, 6),
                                    of_six = PredictTraffic(*six);
      ASSERT_EQ(traffic.size(), of_six.size());
      for (size_t row = 0; row < traffic.size(); ++row)
        EXPECT_EQ(traffic[row].predicted_bytes, of_six[row].predicted_bytes);
    }
  }
  EXPECT_GT(cases, 100);
}

TEST(PlanOfRounds, AStepOfMoreRoundsHasNoMoreOperations) {
  const ModelSpec model = UnitChain(std::vector<int64_t>(12, 64), /*output_bytes=*/1'000);
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    Config config;
    config.zero.stage = 3;
    config.zero.param_persistence_threshold = 0;
    config.zero.offload_param.device = config.zero.offload_optimizer.device = tier;
    const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
    std::vector<size_t> operations, ops;
    std::vector<int64_t> reduced;
    for (const int rounds : {3, 64, 1'000'000}) {
      config.gradient_accumulation_steps = rounds;
      ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(inputs));
      EXPECT_EQ(plan.step_rounds, rounds);
      operations.push_back(plan.ops.size());
      ops.push_back(ListOf(plan, /*carrying=*/true).ops.size());
      reduced.push_back(plan.BytesOf(Role::kReduce) / rounds);
    }
    EXPECT_THAT(operations, Each(operations.front()));
    EXPECT_THAT(ops, Each(ops.front()));
    EXPECT_THAT(reduced, Each(reduced.front()));
  }
}

TEST(PlanOfRounds, CopyHasListsOfItsOwnPlan) {
  const ModelSpec model = UnitChain({64, 64});
  const Config config;
  absl::StatusOr<Plan> plan = PlanStep({.model = &model, .config = &config});
  ASSERT_OK(plan);
  const std::string table = PlanTable(*plan);
  const Plan copy = *plan;
  plan = absl::CancelledError();
  EXPECT_EQ(PlanTable(copy), table);
}

}  // namespace
}  // namespace ebb::sharding::plan_replay_test
