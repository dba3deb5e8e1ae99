// Plans of many rounds: three of them are planned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/sharding/instructions.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_table.h"
#include "ebb/sharding/traffic.h"
#include "random_model.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_rounds_test {
namespace {

using ::testing::Each;

// What an instruction is, without where in the step it has its place.
struct Shown {
  Code code{};
  OperationKind role{};
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
  std::vector<Shown> instructions;
  friend bool operator==(const ShownMoment&, const ShownMoment&) = default;
};

// By round. The first also has the step's begin, and the last its end.
std::vector<std::vector<ShownMoment>> RoundsOf(const Plan& plan, bool carrying) {
  const Fragment fragment = Lower(plan, carrying);
  const int per_round = static_cast<int>(plan.scopes.size()) / plan.decisions.rounds;
  const auto in_round = [&](int scope) { return scope < 0 ? scope : scope % per_round; };
  std::vector<std::vector<ShownMoment>> rounds(static_cast<size_t>(plan.decisions.rounds));
  for (size_t m = 0; m < fragment.moments.size(); ++m) {
    const FragmentMoment& moment = fragment.moments[m];
    const size_t number = m == 0 ? 0 : (m - 1) / static_cast<size_t>(2 * per_round);
    ShownMoment shown{.kind = moment.kind, .scope = in_round(moment.scope), .instructions = {}};
    for (int i = moment.begin; i < moment.end; ++i) {
      const Instruction& from = fragment.instructions[static_cast<size_t>(i)];
      Shown to{.code = from.code,
               .role = from.role,
               .stream = from.stream,
               .carried = from.carried,
               .divides = from.divides,
               .goes_on = from.goes_on,
               .via = from.via,
               .scope = in_round(from.scope),
               .bytes = from.bytes,
               .operands = {from.operands.begin(), from.operands.end()},
               .parts = {}};
      for (const Part& part : from.parts) to.parts.emplace_back(part.unit, -1);
      for (const UpdateDetail& update : from.updates) to.parts.emplace_back(-1, update.sub_group);
      shown.instructions.push_back(std::move(to));
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
      ASSERT_TRUE(three.ok()) << three.status();
      ASSERT_TRUE(six.ok()) << six.status();
      ASSERT_EQ(three->decisions.rounds, 3);
      for (const bool carrying : {false, true}) {
        const auto planned = RoundsOf(*three, carrying), unrolled = RoundsOf(*six, carrying);
        ASSERT_TRUE(planned.front() == unrolled.front());
        for (size_t round = 1; round < 5; ++round)
          ASSERT_TRUE(planned[1] == unrolled[round]) << "round " << round;
        ASSERT_TRUE(planned.back() == unrolled.back());
      }
      for (const OperationKind kind : {OperationKind::kGather, OperationKind::kReduce})
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

TEST(PlanOfRounds, AStepOfMoreRoundsHasNoMoreInstructions) {
  const ModelSpec model = UnitChain(std::vector<int64_t>(12, 64), /*output_bytes=*/1'000);
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    Config config;
    config.zero.stage = 3;
    config.zero.param_persistence_threshold = 0;
    config.zero.offload_param.device = config.zero.offload_optimizer.device = tier;
    const PlanInputs inputs{.model = &model, .config = &config, .world = 2, .optimizer_states = 2};
    std::vector<size_t> operations, instructions;
    std::vector<int64_t> reduced;
    for (const int rounds : {3, 64, 1'000'000}) {
      config.gradient_accumulation_steps = rounds;
      const absl::StatusOr<Plan> plan = PlanStep(inputs);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_EQ(plan->step_rounds, rounds);
      operations.push_back(plan->operations.size());
      instructions.push_back(Lower(*plan, /*carrying=*/true).instructions.size());
      reduced.push_back(plan->BytesOf(OperationKind::kReduce) / rounds);
    }
    EXPECT_THAT(operations, Each(operations.front()));
    EXPECT_THAT(instructions, Each(instructions.front()));
    EXPECT_THAT(reduced, Each(reduced.front()));
  }
}

TEST(PlanOfRounds, CopyHasListsOfItsOwnPlan) {
  const ModelSpec model = UnitChain({64, 64});
  const Config config;
  absl::StatusOr<Plan> plan = PlanStep({.model = &model, .config = &config});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::string table = PlanTable(*plan);
  const Plan copy = *plan;
  plan = absl::CancelledError();
  EXPECT_EQ(PlanTable(copy), table);
}

}  // namespace
}  // namespace ebb::sharding::plan_rounds_test
