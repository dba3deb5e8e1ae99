#include "ebb/runtime/engine/missing_backwards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/engine/scripted.h"

namespace ebb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// forward: u0 u1 u2 u3 u4 u0, of which u2 is frozen.
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
  // A step of `rounds` rounds in which `backwards` come, by round.
  std::string After(int rounds, const std::vector<std::vector<int>>& backwards) {
    const sharding::Plan plan = PlanOf(rounds, model_);
    missing_.Begin(plan);
    for (size_t round = 0; round < backwards.size(); ++round) {
      for (int unit : kScriptedUnits) missing_.Opened(false, unit, static_cast<int>(round));
      for (int unit : backwards[round]) missing_.Opened(true, unit, static_cast<int>(round));
    }
    missing_.End();
    return std::string(missing_.Error().message());
  }

  const ModelSpec model_ = ScriptedModel();
  MissingBackwards missing_;
};

TEST_F(MissingBackwardsTest, NothingIsMissingInAnyOrderAndWithoutFrozenUnits) {
  EXPECT_EQ(After(1, {{0, 4, 3, 2, 1, 0}}), "");
  EXPECT_EQ(After(1, {{0, 4, 3, 1, 0}}), "");
  EXPECT_EQ(After(1, {{1, 0, 3, 0, 4}}), "");
  EXPECT_EQ(After(1, {{0, 4, 4, 3, 2, 1, 0, 0}}), "");
  EXPECT_EQ(After(3, {{0, 4, 3, 2, 1, 0}, {0, 4, 3, 1, 0}, {0, 4, 1, 3, 0}}), "");
}

TEST_F(MissingBackwardsTest, TheFirstInTheOrderOfBackwardIsNamed) {
  EXPECT_THAT(
      After(1, {{0, 2, 0}}),
      AllOf(HasSubstr("Backward('u4') was left out of the step, so its gradient would be zero"),
            HasSubstr("StepOptions::may_leave_out"), HasSubstr("\"strict\": false")));
  EXPECT_THAT(After(1, {{0, 4, 2, 0}}), HasSubstr("Backward('u3') was left out of the step"));
  EXPECT_THAT(
      After(1, {{0, 4, 3, 2, 1}}),
      HasSubstr("Backward('u0') of the step came once, but ModelSpec::forward visits the unit "
                "2 times, so its gradient would lack a part"));
}

TEST_F(MissingBackwardsTest, OfSeveralRoundsTheRoundIsNamed) {
  const std::vector<int> whole = {0, 4, 3, 2, 1, 0};
  EXPECT_THAT(After(3, {whole, {0, 4, 3, 2, 0}, {0, 0}}),
              HasSubstr("Backward('u1') was left out of round 2 of 3, so its gradient would lack"));
  // A second one in one round does not stand for that of another.
  EXPECT_THAT(After(2, {{0, 4, 4, 3, 2, 1, 0}, {0, 3, 2, 1, 0}}),
              HasSubstr("Backward('u4') was left out of round 2 of 2"));
  EXPECT_THAT(After(2, {whole, {}}), HasSubstr("Backward('u0') was left out of round 2 of 2"));
}

TEST_F(MissingBackwardsTest, RoundsThatNeverBeganAreCounted) {
  const std::vector<int> whole = {0, 4, 3, 2, 1, 0};
  EXPECT_THAT(
      After(4, {whole}),
      AllOf(HasSubstr("the step ended after 1 of its 4 rounds"), HasSubstr("Step::rounds()"),
            HasSubstr("StepOptions::micro_batches"), HasSubstr("StepOptions::may_leave_out")));
  EXPECT_THAT(After(4, {whole, whole, whole}), HasSubstr("ended after 3 of its 4 rounds"));
}

// So what is missing is known before the last round, in which updates may start.
TEST_F(MissingBackwardsTest, ARoundIsJudgedWhenTheNextOneBegins) {
  const sharding::Plan plan = PlanOf(2, model_);
  missing_.Begin(plan);
  for (int unit : {0, 4, 3, 2, 0}) missing_.Opened(true, unit, 0);
  EXPECT_TRUE(missing_.Error().ok());
  missing_.Opened(false, 0, 1);
  EXPECT_THAT(std::string(missing_.Error().message()), HasSubstr("Backward('u1')"));
  missing_.Begin(plan);
  EXPECT_TRUE(missing_.Error().ok());
}

// Backward ends at the first trainable visit: what comes before it in forward has none.
TEST_F(MissingBackwardsTest, UnitsBeforeTheFirstTrainableVisitAreNotMissed) {
  ModelSpec model = ScriptedModel();
  for (ParameterId id : model.units[0].parameters)
    model.parameters[static_cast<size_t>(id)].trainable = false;
  const sharding::Plan plan = PlanOf(1, model);
  missing_.Begin(plan);
  for (int unit : {4, 3, 1}) missing_.Opened(true, unit, 0);
  missing_.End();
  EXPECT_TRUE(missing_.Error().ok()) << missing_.Error();
}

}  // namespace
}  // namespace ebb::testing
