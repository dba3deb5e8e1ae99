#include "ebb/sharding/decisions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/reduction.h"
#include "ebb/sharding/plan.h"
#include "random_model.h"
#include "tests/status.h"
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
  EXPECT_OK(layout);
  const absl::StatusOr<Decisions> decisions = Decide(inputs, *layout, 0, hold);
  EXPECT_OK(decisions);
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

ParameterId Add(ModelSpec& model, UnitId unit, std::string name, std::optional<DType> compute,
                bool trainable = true) {
  return model.Add(unit, {.name = std::move(name),
                          .shape = {4},
                          .init = Constant(0),
                          .trainable = trainable,
                          .compute = compute});
}

ModelSpec Block() {
  ModelSpec model;
  const UnitId block = model.AddUnit("block"), head = model.AddUnit("head");
  Add(model, block, "base", DType::kInt8, /*trainable=*/false);
  Add(model, block, "norm", DType::kFloat32);
  Add(model, block, "adapter", std::nullopt);
  Add(model, block, "bias", DType::kFloat32);
  Add(model, head, "head", DType::kBFloat16);
  model.forward = {{.unit = block}, {.unit = head}};
  return model;
}

std::string Events(const ModelSpec& model) {
  std::string text;
  for (const ScopeEvent& event : model.order) {
    text += event.opens ? "(" : ")";
    text += event.backward ? "B" : "F";
    text += std::to_string(event.visit);
  }
  return text;
}

TEST(DivideByDType, PartsOpenAndCloseInsideTheirUnitWhichKeepsTheTrainedParameters) {
  const ModelSpec model = DivideByDType(Block(), DType::kBFloat16);
  ASSERT_EQ(model.units.size(), 4u);
  EXPECT_EQ(model.units[0].name, "block");
  EXPECT_EQ(model.units[0].parameters, (std::vector{ParameterId{1}, ParameterId{3}}));
  EXPECT_EQ(model.units[0].parts, (std::vector{UnitId{2}, UnitId{3}}));
  EXPECT_EQ(model.units[2].name, "block [bf16]");
  EXPECT_EQ(model.units[2].parameters, (std::vector{ParameterId{2}}));
  EXPECT_EQ(model.units[3].name, "block [int8]");
  EXPECT_EQ(model.units[3].parameters, (std::vector{ParameterId{0}}));
  std::vector<UnitId> visits;
  for (const Visit& visit : model.forward) visits.push_back(visit.unit);
  EXPECT_EQ(visits, (std::vector{UnitId{0}, UnitId{2}, UnitId{3}, UnitId{1}}));
  EXPECT_EQ(Events(model), "(F0(F1(F2)F2)F1)F0(F3)F3(B3)B3(B0(B1(B2)B2)B1)B0");
  EXPECT_OK(Validate(model));
  EXPECT_EQ(sharding::Fingerprint(DivideByDType(model, DType::kBFloat16)),
            sharding::Fingerprint(model));
}

TEST(DivideByDType, AModelOfOneDTypeStaysAsItIs) {
  ModelSpec model = Block();
  for (ParameterSpec& parameter : model.parameters) parameter.compute = std::nullopt;
  model.parameters[3].compute = DType::kFloat32;
  EXPECT_EQ(sharding::Fingerprint(DivideByDType(model, DType::kFloat32)),
            sharding::Fingerprint(model));
}

TEST(DivideByDType, ParametersThatAreWholeOverTensorArePartsBesideOthers) {
  ModelSpec model = Block();
  for (const int whole : {1, 2})  // "norm", "adapter"
    model.parameters[static_cast<size_t>(whole)].over_tensor = OverTensor::kWhole;
  model = DivideByDType(std::move(model), DType::kBFloat16);
  std::vector<std::string> names;
  for (const UnitSpec& unit : model.units) names.push_back(unit.name);
  EXPECT_EQ(names, (std::vector<std::string>{"block", "head", "block [whole]",
                                             "block [bf16, whole]", "block [int8]"}));
  EXPECT_EQ(model.units[0].parameters, (std::vector{ParameterId{3}}));
  // If all trained parameters of a unit are whole, the unit keeps them.
  model = Block();
  for (const int whole : {1, 2, 3})
    model.parameters[static_cast<size_t>(whole)].over_tensor = OverTensor::kWhole;
  model = DivideByDType(std::move(model), DType::kFloat32);
  EXPECT_EQ(model.units[0].parameters,
            (std::vector{ParameterId{1}, ParameterId{2}, ParameterId{3}}));
  EXPECT_EQ(model.units[2].name, "block [int8, local]");
}

TEST(DivideByDType, AnOrderThatCannotBeIsRefusedLater) {
  ModelSpec model = Block();
  model.forward[1].unit = UnitId{9};
  EXPECT_FALSE(Validate(DivideByDType(model, DType::kBFloat16)).ok());
  model = Block();
  model.order = {{.visit = 7}};
  EXPECT_FALSE(Validate(DivideByDType(model, DType::kBFloat16)).ok());
}

// Where one rank's slice is all of a gradient, the buffer that backward writes is the shard.

constexpr int64_t kSizes[] = {3'000, 5'000, 700};

int64_t GradientBytes(const Plan& plan) {
  for (const MemoryRow& row : PredictMemory(plan.table.bytes)) {
    if (row.state == StateClass::kGradient && row.tier == Tier::kDevice)
      return static_cast<int64_t>(row.predicted_bytes);
  }
  return 0;
}

struct Setting {
  std::string name;
  Config config = {};
  int world = 1;
  bool is_shard = true;
};

// bf16, one round, one micro-batch: nothing is cut, cast or added up.
Config Plain() {
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 2;
  return config;
}

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  const auto add = [&](std::string name, bool is_shard, auto change, int world = 1) {
    settings.push_back(
        {.name = std::move(name), .config = Plain(), .world = world, .is_shard = is_shard});
    change(settings.back().config);
  };
  for (int stage = 0; stage <= 3; ++stage)
    add(absl::StrCat("Stage", stage), true, [&](Config& c) { c.zero.stage = stage; });
  add(
      "Replicas", true,
      [](Config& c) {
        c.compute = DType::kFloat32;
        c.ebb.shard_group = 1;
      },
      /*world=*/2);
  add("SummedInFp32OverAStep", true, [](Config& c) {
    c.communication = DType::kFloat32;
    c.gradient_accumulation_steps = 3;
    c.ebb.reduce_at = ReduceAt::kStep;
  });
  add("ParametersOnNvme", true, [](Config& c) {
    c.zero.stage = 3;
    c.zero.offload_param.device = Tier::kNvme;
  });
  add(
      "TwoShards", false, [](Config&) {}, /*world=*/2);
  add(
      "ReplicasThatRound", false, [](Config& c) { c.ebb.shard_group = 1; }, /*world=*/2);
  add("SeveralRounds", false, [](Config& c) { c.gradient_accumulation_steps = 2; });
  add("CastToSend", false,
      [](Config& c) { c.gradient_accumulation_steps = c.ebb.micro_batches_per_round = 2; });
  add("GradientsInRam", false, [](Config& c) {
    c.zero.offload_optimizer.device = Tier::kCpu;
    c.ebb.offload_gradients = Tier::kCpu;
  });
  return settings;
}

TEST(GradientShard, HasOneBufferWhereNothingIsCutCastOrAddedUp) {
  const ModelSpec model = UnitChain({kSizes, std::end(kSizes)});
  for (const Setting& setting : Settings()) {
    SCOPED_TRACE(setting.name);
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep({.model = &model,
                                                    .config = &setting.config,
                                                    .world = setting.world,
                                                    .optimizer_states = 2}));
    int64_t shards = 0;
    for (size_t u = 0; u < std::size(kSizes); ++u) {
      const int unit = static_cast<int>(u), shard = plan.table.Find(Purpose::kGradientShard, unit);
      const Tier tier = plan.table.TierOf(shard);
      shards += PoolAligned(plan.layout.units[u].trainable.shard *
                            SizeOf(plan.decisions.shard_dtype(unit)));
      const bool same = tier == Tier::kDevice && plan.table.Find(Purpose::kGradient, unit) == shard;
      EXPECT_EQ(same, setting.is_shard) << "unit " << u;
      EXPECT_EQ(GradientIsShard(plan.decisions, tier, unit), same);
    }
    // The table has the shards and, elsewhere, whole gradients beside them.
    if (setting.is_shard) {
      EXPECT_EQ(GradientBytes(plan), BufferBytes(shards));
    } else if (plan.table.TierOf(plan.table.Find(Purpose::kGradientShard, 0)) == Tier::kDevice) {
      EXPECT_GT(GradientBytes(plan), BufferBytes(shards));
    }
  }
}

// A unit that is visited twice adds its gradients up in a shard; those around it have one buffer
// each.
TEST(GradientShard, IsDecidedByUnit) {
  ModelSpec model = UnitChain({kSizes, std::end(kSizes)});
  model.forward.push_back({.unit = UnitId{1}});
  const Config config = Plain();
  const absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .world = 1, .optimizer_states = 2});
  ASSERT_OK(plan);
  EXPECT_TRUE(GradientIsShard(plan->decisions, Tier::kDevice, 0));
  EXPECT_FALSE(GradientIsShard(plan->decisions, Tier::kDevice, 1));
  EXPECT_TRUE(GradientIsShard(plan->decisions, Tier::kDevice, 2));
}

}  // namespace
}  // namespace ebb::sharding::decisions_test
