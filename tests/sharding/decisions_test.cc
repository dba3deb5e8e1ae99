#include "ebb/sharding/decisions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "unit_chain.h"

namespace ebb::sharding::decisions_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Config ConfigOf(int stage) {
  Config config;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = stage;
  return config;
}

Decisions DecideFor(const ModelSpec& model, const Config& config, int world, bool hold = false) {
  const PlanInputs inputs{.model = &model, .config = &config, .world = world};
  const absl::StatusOr<ModelLayout> layout = LayOut(model, world);
  EXPECT_TRUE(layout.ok()) << layout.status();
  const absl::StatusOr<Decisions> decisions = Decide(inputs, *layout, 0, hold);
  EXPECT_TRUE(decisions.ok()) << decisions.status();
  return *decisions;
}

TEST(Decisions, StageThreeKeepsSmallUnitsWholeWhileTheyFitTogether) {
  const ModelSpec model = UnitChain({100, 101, 60, 100, 40});
  Config config = ConfigOf(3);
  config.zero.param_persistence_threshold = 100;
  EXPECT_THAT(DecideFor(model, config, 2).kept_whole, ElementsAre(true, false, true, true, true));
  config.zero.model_persistence_threshold = 200;
  EXPECT_THAT(DecideFor(model, config, 2).kept_whole, ElementsAre(true, false, true, false, true));
}

TEST(Decisions, LowerStagesAndASingleRankKeepEverythingWhole) {
  const ModelSpec model = UnitChain({1'000'000});
  for (int stage : {0, 1, 2}) EXPECT_THAT(DecideFor(model, ConfigOf(stage), 4).kept_whole[0], true);
  EXPECT_THAT(DecideFor(model, ConfigOf(3), 1).kept_whole[0], true);
  EXPECT_THAT(DecideFor(model, ConfigOf(3), 2).kept_whole[0], false);
}

// A gradient that one reduction completes needs no shard of another dtype, where the values are the
// same in both.
TEST(Decisions, ReducedSlicesAreSummedOnlyWhereThatChangesSomething) {
  ModelSpec model = UnitChain({100, 100});
  model.forward.push_back({.unit = static_cast<UnitId>(1)});  // visited twice
  Config config = ConfigOf(2);
  config.compute = DType::kBFloat16;
  EXPECT_THAT(DecideFor(model, config, 2).accumulates, ElementsAre(false, true));
  EXPECT_EQ(DecideFor(model, config, 2).shard_dtype(0), DType::kBFloat16);
  EXPECT_EQ(DecideFor(model, config, 2).shard_dtype(1), DType::kFloat32);
  config.accumulation = DType::kFloat16;  // rounds bf16
  EXPECT_THAT(DecideFor(model, config, 2).accumulates, ElementsAre(true, true));
  config.accumulation = DType::kBFloat16;
  EXPECT_THAT(DecideFor(model, config, 2).accumulates, ElementsAre(false, true));
  config.zero.stage = 0;  // gathered again in the accumulation dtype
  EXPECT_THAT(DecideFor(model, config, 2).accumulates, ElementsAre(true, true));
}

TEST(Decisions, WholeGradientsAreOfTheAccumulationDtypeWhereSeveralAreSummed) {
  const ModelSpec model = UnitChain({100});
  Config config = ConfigOf(2);
  config.compute = DType::kBFloat16;
  EXPECT_EQ(DecideFor(model, config, 2).gradient, DType::kBFloat16);
  config.gradient_accumulation_steps = 4;
  EXPECT_EQ(DecideFor(model, config, 2).gradient, DType::kBFloat16);
  config.ebb.reduce_at = ReduceAt::kStep;
  EXPECT_EQ(DecideFor(model, config, 2).gradient, DType::kFloat32);
  EXPECT_TRUE(DecideFor(model, config, 2).keeps_step_gradients);
  config.ebb.reduce_at = ReduceAt::kRound;
  config.ebb.micro_batches_per_round = 2;
  EXPECT_EQ(DecideFor(model, config, 2).gradient, DType::kFloat32);
  EXPECT_FALSE(DecideFor(model, config, 2).keeps_step_gradients);
}

TEST(Decisions, OneRoundAStepReducesTheSameWayWhateverReduceAtSays) {
  const ModelSpec model = UnitChain({100});
  Config config = ConfigOf(2);
  config.gradient_accumulation_steps = config.ebb.micro_batches_per_round = 4;
  config.ebb.reduce_at = ReduceAt::kStep;
  EXPECT_FALSE(DecideFor(model, config, 2).keeps_step_gradients);
}

TEST(Decisions, CarryTheSecondOfEachThreeEarlyUpdatesAndAllLateOnes) {
  Config config = ConfigOf(3);
  config.gradient_clipping = 0;
  config.ebb.check_overflow = false;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  const auto carried = [&](const std::vector<int64_t>& sizes) {
    return DecideFor(UnitChain(sizes), config, 1).carried;
  };
  EXPECT_THAT(carried({800, 800, 800, 800, 800, 800}),
              ElementsAre(false, true, false, false, true, false));
  EXPECT_THAT(carried({800}), ElementsAre(false));
  EXPECT_THAT(carried({800, 800}), ElementsAre(false, true));
  // By elements.
  EXPECT_THAT(carried({80'000, 20'000, 20'000, 20'000, 20'000}),
              ElementsAre(false, true, true, false, true));
  config.gradient_clipping = 1;
  EXPECT_THAT(carried({800, 800, 800}), ElementsAre(true, true, true));
  config.zero.offload_param.device = Tier::kDevice;
  EXPECT_THAT(carried({800, 800, 800}), ElementsAre(false, false, false));
}

TEST(Decisions, SayWhyUpdatesStartWhenTheyDo) {
  const ModelSpec model = UnitChain({100});
  Config config = ConfigOf(2);
  const auto reason = [&](bool hold = false) {
    return DecideFor(model, config, 2, hold).timing_reason;
  };
  config.gradient_clipping = 1;
  EXPECT_THAT(reason(), HasSubstr("gradient_clipping"));
  config.gradient_clipping = 0;
  EXPECT_THAT(reason(), HasSubstr("overflow"));
  config.ebb.check_overflow = false;
  EXPECT_EQ(DecideFor(model, config, 2).timing, UpdateTiming::kEarly);
  EXPECT_THAT(reason(/*hold=*/true), HasSubstr("holds"));
  config.ebb.asynchronous_step = AsynchronousStep::kLate;
  EXPECT_THAT(reason(), HasSubstr("asynchronous_step is late"));
  config.ebb.asynchronous_step = AsynchronousStep::kOff;
  EXPECT_EQ(DecideFor(model, config, 2).timing, UpdateTiming::kOff);
}

TEST(Decisions, RefuseDTypesThatTheTrainerLacksAndNameTheKeys) {
  ModelSpec model = UnitChain({100});
  Config config = ConfigOf(2);
  const auto refusal = [&] {
    const PlanInputs inputs{.model = &model, .config = &config, .world = 2};
    const absl::StatusOr<Decisions> decisions = Decide(inputs, *LayOut(model, 2), 0, false);
    return std::string(decisions.status().message());
  };
  EXPECT_EQ(refusal(), "");
  model.compute_dtypes = {DType::kBFloat16, DType::kFloat16};
  EXPECT_THAT(refusal(), AllOf(HasSubstr("parameters are fp32 (\"bf16.enabled\" and"),
                               HasSubstr("takes bf16 or fp16 (ModelSpec::compute_dtypes)")));
  config.compute = DType::kBFloat16;
  EXPECT_EQ(refusal(), "");
  config.compute = DType::kFloat16;
  EXPECT_EQ(refusal(), "");
  model.compute_dtypes = {DType::kFloat32};
  EXPECT_THAT(refusal(), HasSubstr("parameters are fp16 (\"fp16.enabled\" is true)"));

  // One micro-batch a reduction: the dtype that is sent.
  model.compute_dtypes = {};
  model.gradient_dtypes = {DType::kFloat32};
  EXPECT_THAT(refusal(), AllOf(HasSubstr("gradients are fp16"),
                               HasSubstr("set \"communication_data_type\" to \"fp32\"")));
  config.communication = DType::kFloat32;
  EXPECT_EQ(refusal(), "");
  model.gradient_dtypes = {DType::kFloat16};
  EXPECT_THAT(refusal(), HasSubstr("set \"communication_data_type\" to \"fp16\""));
  config.communication = {};
  EXPECT_EQ(refusal(), "");

  // Several: the dtype in which they are added up, over a round or over the step.
  config.gradient_accumulation_steps = 4;
  EXPECT_EQ(refusal(), "");
  config.ebb.micro_batches_per_round = 2;
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("gradients are fp32"), HasSubstr("adds up 2 micro-batches"),
                    HasSubstr("set \"data_types.grad_accum_dtype\" to \"fp16\"")));
  config.ebb.micro_batches_per_round = 1;
  config.ebb.reduce_at = ReduceAt::kStep;
  EXPECT_THAT(refusal(), HasSubstr("adds up the step's 4 micro-batches"));
  model.gradient_dtypes = {DType::kFloat16, DType::kFloat32};
  EXPECT_EQ(refusal(), "");

  // A model without anything trainable has no gradients.
  model.gradient_dtypes = {DType::kBFloat16};
  EXPECT_NE(refusal(), "");
  model.parameters[0].trainable = false;
  EXPECT_EQ(refusal(), "");
}

TEST(Decisions, GroupsAreOfCoalesceBytesElseOfTheBucketsUpToOneMebibyte) {
  Config config;
  constexpr int64_t kMebibyte = int64_t{1} << 20;
  EXPECT_EQ(GatherGroupElements(config, DType::kBFloat16), kMebibyte / 2);
  EXPECT_EQ(ReduceGroupBytes(config), kMebibyte);
  config.zero.allgather_bucket_size = 1'000;
  config.zero.reduce_bucket_size = 500;
  EXPECT_EQ(GatherGroupElements(config, DType::kBFloat16), 1'000);
  EXPECT_EQ(ReduceGroupBytes(config), 500 * 4);
  config.zero.allgather_bucket_size = config.zero.reduce_bucket_size = int64_t{1} << 40;
  EXPECT_EQ(GatherGroupElements(config, DType::kBFloat16), kMebibyte / 2);
  EXPECT_EQ(ReduceGroupBytes(config), kMebibyte);
  config.ebb.coalesce_bytes = 0;
  EXPECT_EQ(GatherGroupElements(config, DType::kBFloat16), 0);
  EXPECT_EQ(ReduceGroupBytes(config), 0);
}

}  // namespace
}  // namespace ebb::sharding::decisions_test
