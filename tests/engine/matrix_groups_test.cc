// Which parameters Muon updates, and by what rates the others are updated.
#include "ebb/runtime/engine/matrix_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ebb/runtime/engine/program.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"

namespace ebb::testing::matrix_groups_test {
namespace {

using ::testing::HasSubstr;

ParameterSpec Parameter(std::string name, std::vector<int64_t> shape, std::string group = "") {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .init = Constant(0),
          .group = std::move(group)};
}

ModelSpec Transformer() {
  ModelSpec model;
  const UnitId embedding = model.AddUnit("embedding"), block = model.AddUnit("block"),
               head = model.AddUnit("head");
  model.Add(embedding, Parameter("model.embed_tokens.weight", {100, 8}));
  model.Add(block, Parameter("model.layers.0.qkv.weight", {24, 8}, "qkv"));
  model.Add(block, Parameter("model.layers.0.heads.weight", {8, 8}));
  model.Add(block, Parameter("model.layers.0.norm.weight", {8}, "norms"));
  model.Add(block, Parameter("model.layers.0.experts", {4, 8, 8}, "experts"));
  model.Add(head, Parameter("lm_head.weight", {100, 8}));
  for (const UnitId unit : {embedding, block, head}) model.forward.push_back({.unit = unit});
  return model;
}

Config Muon() {
  Config config;
  config.micro_batch_size = 1;
  config.optimizer = {.type = OptimizerType::kMuon,
                      .learning_rate = 0.02,
                      .weight_decay = 0.1,
                      .momentum = 0.95,
                      .adam_learning_rate = 0.005};
  config.ebb.parameter_groups["qkv"].muon_matrices = {1, 1, 1};
  config.ebb.parameter_groups["norms"].weight_decay = 0.0;
  config.ebb.parameter_groups["norms"].lr_factor = 2;
  config.ebb.parameter_groups["experts"].use_muon = true;
  return config;
}

TEST(MatrixGroupsTest, TheRuleTakesMatricesOfHiddenLayers) {
  Config config = Muon();
  ASSERT_OK_AND_ASSIGN(const ModelSpec model, WithMatrixGroups(Transformer(), config));
  using enum MatrixUpdate;
  const MatrixUpdate expected[] = {kNo, kYes, kYes, kNo, kYes, kNo};
  const char* const groups[] = {"[AdamW]", "qkv", "", "norms [AdamW]", "experts", "[AdamW]"};
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    EXPECT_EQ(model.parameters[p].matrix_update, expected[p]) << model.parameters[p].name;
    EXPECT_EQ(model.parameters[p].group, groups[p]);
  }
  EXPECT_THAT(model.parameters[1].matrix_rows, ::testing::ElementsAre(8, 8, 8));
  ASSERT_EQ(config.remarks.size(), 1u);
  EXPECT_EQ(config.remarks.front(),
            "Muon updates 3 parameters of 512 elements, and AdamW 3 parameters of 1608 elements, "
            "among them model.embed_tokens.weight, lm_head.weight; \"use_muon\" of a parameter "
            "group decides otherwise");
  const ParameterGroupConfig& norms = config.ebb.parameter_groups.at("norms [AdamW]");
  EXPECT_EQ(norms.optimizer->type, OptimizerType::kAdamW);
  EXPECT_EQ(norms.optimizer->weight_decay, 0);
  EXPECT_EQ(norms.lr_factor, 0.5);
  EXPECT_EQ(config.ebb.parameter_groups.at("[AdamW]").lr_factor, 0.25);
  EXPECT_EQ(config.ebb.parameter_groups.at("[AdamW]").optimizer->weight_decay, 0.1);
}

TEST(MatrixGroupsTest, NamesOfEmbeddingsAndOutputsAreNoHiddenLayers) {
  for (const char* const name :
       {"transformer.wte.weight", "wpe", "lm_head.weight", "model.Embed_tokens.weight",
        "head.weight", "score.weight", "patch_embedding.projection", "shared.weight",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "tok_emb.weight",
        "blocks.emb.weight", "out_head.weight"})
    EXPECT_FALSE(IsOfHiddenLayer(name)) << name;
  for (const char* const name : {"h.0.attn.c_attn.weight", "heads.weight", "overhead", "outputs",
                                 "encoder.layer.0.attention.output.dense.weight",
                                 "encoder.layer.0.output.dense.weight", "ensemble.weight"})
    EXPECT_TRUE(IsOfHiddenLayer(name)) << name;
}

TEST(MatrixGroupsTest, ASecondCallChangesNothing) {
  Config config = Muon();
  ASSERT_OK_AND_ASSIGN(const ModelSpec once, WithMatrixGroups(Transformer(), config));
  const Config first = config;
  ASSERT_OK_AND_ASSIGN(const ModelSpec twice, WithMatrixGroups(once, config));
  EXPECT_EQ(config.ToJson(), first.ToJson());
  EXPECT_EQ(config.remarks, first.remarks);
  for (size_t p = 0; p < once.parameters.size(); ++p) {
    EXPECT_EQ(once.parameters[p].group, twice.parameters[p].group);
    EXPECT_EQ(once.parameters[p].matrix_update, twice.parameters[p].matrix_update);
  }
}

// An engine's model and the configuration that it was given make the same engine again.
TEST(MatrixGroupsTest, AModelThatAnEngineHasShownKeepsItsRates) {
  Config config = Muon(), again = Muon();
  ASSERT_OK_AND_ASSIGN(const ModelSpec once, WithMatrixGroups(Transformer(), config));
  ASSERT_OK_AND_ASSIGN(const ModelSpec twice, WithMatrixGroups(once, again));
  EXPECT_EQ(again.ToJson(), config.ToJson());
  for (size_t p = 0; p < once.parameters.size(); ++p)
    EXPECT_EQ(once.parameters[p].group, twice.parameters[p].group);
}

TEST(MatrixGroupsTest, ATrainersOwnOptimizerUpdatesAll) {
  Config config = Muon();
  ASSERT_OK_AND_ASSIGN(const ModelSpec model,
                       WithMatrixGroups(Transformer(), config, /*has_own_optimizer=*/true));
  EXPECT_EQ(config.ToJson(), Muon().ToJson());
  for (const ParameterSpec& parameter : model.parameters)
    EXPECT_EQ(parameter.matrix_update, MatrixUpdate::kNo);
}

TEST(MatrixGroupsTest, ARatioDividesTheRows) {
  Config config = Muon();
  config.ebb.parameter_groups["qkv"].muon_matrices = {4, 1, 1};
  ASSERT_OK_AND_ASSIGN(const ModelSpec model, WithMatrixGroups(Transformer(), config));
  EXPECT_THAT(model.parameters[1].matrix_rows, ::testing::ElementsAre(16, 4, 4));
}

TEST(MatrixGroupsTest, ARemarkNamesMatricesThatSeemToBeSeveral) {
  Config config = Muon();
  config.ebb.parameter_groups["qkv"].muon_matrices = {1};
  ASSERT_OK(WithMatrixGroups(Transformer(), config).status());
  ASSERT_EQ(config.remarks.size(), 1u);
  EXPECT_THAT(config.remarks.front(),
              HasSubstr("; model.layers.0.qkv.weight is taken for one matrix: \"muon_matrices\" of "
                        "a parameter group divides it"));
}

TEST(MatrixGroupsTest, ARemarkNamesMatricesOfNoNumberedLayer) {
  Config config = Muon();
  ModelSpec model = Transformer();
  model.Add(UnitId{2}, Parameter("out.weight", {100, 8}));
  ASSERT_OK(WithMatrixGroups(std::move(model), config).status());
  EXPECT_THAT(config.remarks.front(),
              HasSubstr("Muon updates 4 parameters of 1312 elements, among them out.weight of no "
                        "numbered layer, and AdamW 3"));
}

TEST(MatrixGroupsTest, ATableIsNotTakenByTheRuleButByItsGroup) {
  ModelSpec model = Transformer();
  model.parameters[1].matrix_update = model.parameters[2].matrix_update = MatrixUpdate::kNotByRule;
  Config config = Muon();
  config.ebb.parameter_groups["qkv"].use_muon = true;
  ASSERT_OK_AND_ASSIGN(const ModelSpec taken, WithMatrixGroups(model, config));
  EXPECT_EQ(taken.parameters[1].matrix_update, MatrixUpdate::kYes);
  EXPECT_EQ(taken.parameters[2].matrix_update, MatrixUpdate::kNo);
}

TEST(MatrixGroupsTest, WhatIsNoMatrixIsRefusedByName) {
  const auto refusal = [](const Config& given, const ModelSpec& model) {
    Config config = given;
    return std::string(WithMatrixGroups(model, config).status().message());
  };
  Config config = Muon();
  config.ebb.parameter_groups["norms"].use_muon = true;
  EXPECT_THAT(
      refusal(config, Transformer()),
      HasSubstr("parameter 'model.layers.0.norm.weight' is to be updated by Muon, but has 1 "
                "dimension"));
  config = Muon();
  config.ebb.parameter_groups["qkv"].muon_matrices = {2, 2, 1};
  EXPECT_THAT(refusal(config, Transformer()),
              HasSubstr("has 24 rows, which \"muon_matrices\" of its group cannot divide into 3 "
                        "matrices: 24 is not a multiple of 5"));
  config = Muon();
  config.ebb.parameter_groups["qkv"].use_muon = false;
  EXPECT_THAT(refusal(config, Transformer()),
              HasSubstr("\"ebb.parameter_groups.qkv.muon_matrices\" is given, but Muon updates no "
                        "parameter of the group"));
  ModelSpec model = Transformer();
  model.parameters[2].matrix_rows = {5, 4};
  EXPECT_THAT(refusal(Muon(), model), HasSubstr("ParameterSpec::matrix_rows are 5, 4"));
}

// 4 bytes of states for each element of a matrix, where AdamW has 8.
TEST(MatrixGroupsTest, MatricesHaveOneState) {
  const auto states_of = [](const Config& config) {
    int64_t bytes = 0;
    const auto program = PredictProgram(Transformer(), 1, config);
    EXPECT_TRUE(program.ok()) << program.status();
    for (const sharding::Array& row : program->plan().table.rows)
      if (row.purpose == sharding::Purpose::kState) bytes += row.bytes();
    return bytes;
  };
  Config muon = Muon();
  muon.zero.stage = 0;
  Config adam;
  adam.micro_batch_size = 1;
  for (const char* group : {"qkv", "norms", "experts"}) adam.ebb.parameter_groups[group] = {};
  EXPECT_EQ(states_of(adam) - states_of(muon), 4 * (24 * 8 + 8 * 8 + 4 * 8 * 8));
}

// The rate that a step gives reaches the parameters of AdamW by their part of it.
TEST(MatrixGroupsTest, AStepsRateIsForBoth) {
  const auto masters = [](std::optional<double> rate, double configured) {
    Config config = ConfigFor({.world = 1, .stage = 0});
    config.gradient_clipping = 0;
    config.optimizer = {.type = OptimizerType::kMuon,
                        .learning_rate = configured,
                        .momentum = 0.5,
                        .adam_learning_rate = configured / 8};
    const ToyModel toy({.width = 13});
    std::vector<uint32_t> bits;
    const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
      ToyModel model({.width = 13});
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model.spec(), config));
      StepOptions options;
      options.learning_rate = rate;
      EBB_RETURN_IF_ERROR(model.Train(engine, 0, 0, options));
      EBB_ASSIGN_OR_RETURN(bits, MasterBits(engine, model.spec()));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return bits;
  };
  EXPECT_EQ(masters(0.25, 0.5), masters(std::nullopt, 0.25));
  EXPECT_NE(masters(0.25, 0.5), masters(std::nullopt, 0.5));
}

}  // namespace
}  // namespace ebb::testing::matrix_groups_test
