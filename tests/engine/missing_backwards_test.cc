#include "ebb/runtime/engine/missing_backwards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ebb/sharding/declared_order.h"
#include "tests/engine/scripted.h"

namespace ebb::testing::missing_backwards_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// forward: u0 u1 u2 u3 u4 u0; u2 is frozen.
class MissingBackwardsTest : public ::testing::Test {
 protected:
  sharding::Plan PlanOf(int rounds, const ModelSpec& model) {
    Config config = ConfigFor({.world = 2, .stage = 2});
    config.gradient_accumulation_steps = rounds;
    const absl::StatusOr<sharding::Plan> plan =
        sharding::PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *plan;
  }
  // A step of `rounds` rounds. Each opens all of its forward, and the backwards of `backwards`.
  std::string After(int rounds, const std::vector<std::vector<int>>& backwards) {
    const sharding::Plan plan = PlanOf(rounds, model_);
    missing_.Begin(plan, plan.step_rounds);
    const int of_round = static_cast<int>(plan.scopes.size()) / plan.decisions.rounds;
    int next = 0;
    for (int s = 0; s < static_cast<int>(backwards.size()) * of_round; ++s) {
      const sharding::PlannedScope& scope = plan.scopes[static_cast<size_t>(s % of_round)];
      const std::vector<int>& visits = backwards[static_cast<size_t>(s / of_round)];
      if (scope.backward && std::find(visits.begin(), visits.end(), scope.visit) == visits.end())
        continue;
      missing_.LeftOut(next, s);
      next = s + 1;
    }
    missing_.LeftOut(next, rounds * of_round);
    return std::string(missing_.Error().message());
  }

  const ModelSpec model_ = ScriptedModel();
  MissingBackwards missing_;
};

TEST_F(MissingBackwardsTest, NothingIsMissingWithoutFrozenUnits) {
  EXPECT_EQ(After(1, {{5, 4, 3, 2, 1, 0}}), "");
  EXPECT_EQ(After(1, {{5, 4, 3, 1, 0}}), "");
  EXPECT_EQ(After(3, {{5, 4, 3, 2, 1, 0}, {5, 4, 3, 1, 0}, {5, 4, 3, 1, 0}}), "");
}

TEST_F(MissingBackwardsTest, TheFirstInTheOrderOfBackwardIsNamed) {
  EXPECT_THAT(
      After(1, {{5, 2, 0}}),
      AllOf(HasSubstr("Backward('u4') was left out of the step, so its gradient would be zero"),
            HasSubstr("in the order of the model (ModelSpec::forward, ModelSpec::order)"),
            HasSubstr("StepOptions::may_leave_out"), HasSubstr("\"strict\": false")));
  EXPECT_THAT(After(1, {{5, 4, 2, 0}}), HasSubstr("Backward('u3') was left out of the step"));
  for (const std::vector<int>& backwards : {std::vector{5, 4, 3, 2, 1}, {4, 3, 2, 1, 0}}) {
    EXPECT_THAT(After(1, {backwards}),
                HasSubstr("Backward('u0') was left out of the step once of the 2 times that "
                          "the model has it, so its gradient would lack a part"));
  }
}

TEST_F(MissingBackwardsTest, TheRoundIsNamedIfThereAreSeveral) {
  const std::vector<int> whole = {5, 4, 3, 2, 1, 0};
  EXPECT_THAT(After(3, {whole, {5, 4, 3, 2, 0}, {5, 0}}),
              HasSubstr("Backward('u1') was left out of round 2 of 3, so its gradient would lack"));
  EXPECT_THAT(After(2, {whole, {5, 3, 2, 1, 0}}),
              HasSubstr("Backward('u4') was left out of round 2 of 2"));
  EXPECT_THAT(After(2, {whole, {}}), HasSubstr("Backward('u0') was left out of round 2 of 2, so"));
}

TEST_F(MissingBackwardsTest, RoundsThatNeverBeganAreCounted) {
  const std::vector<int> whole = {5, 4, 3, 2, 1, 0};
  EXPECT_THAT(
      After(4, {whole}),
      AllOf(HasSubstr("the step ended after 1 of its 4 rounds"), HasSubstr("Step::rounds()"),
            HasSubstr("StepOptions::micro_batches"), HasSubstr("StepOptions::may_leave_out")));
  EXPECT_THAT(After(4, {whole, whole, whole}), HasSubstr("ended after 3 of its 4 rounds"));
}

// What is left out comes no more, so it is known before the updates that follow.
TEST_F(MissingBackwardsTest, IsKnownAtOnce) {
  const sharding::Plan plan = PlanOf(2, model_);
  missing_.Begin(plan, plan.step_rounds);
  missing_.LeftOut(9, 10);  // of u2, which is frozen
  EXPECT_TRUE(missing_.Error().ok());
  missing_.LeftOut(10, 11);
  EXPECT_THAT(std::string(missing_.Error().message()), HasSubstr("Backward('u1')"));
  missing_.LeftOut(11, 12);
  EXPECT_THAT(std::string(missing_.Error().message()), HasSubstr("Backward('u1')"));
  missing_.Begin(plan, plan.step_rounds);
  EXPECT_TRUE(missing_.Error().ok());
}

// Backward ends at the first trainable visit. Earlier visits of forward have none.
TEST_F(MissingBackwardsTest, UnitsBeforeTheFirstTrainableVisitAreNotMissed) {
  ModelSpec model = ScriptedModel();
  for (ParameterId id : model.units[0].parameters)
    model.parameters[static_cast<size_t>(id)].trainable = false;
  const sharding::Plan plan = PlanOf(1, model);
  missing_.Begin(plan, plan.step_rounds);
  missing_.LeftOut(0, 6);  // every Forward
  EXPECT_TRUE(missing_.Error().ok()) << missing_.Error();
}

}  // namespace
}  // namespace ebb::testing::missing_backwards_test
