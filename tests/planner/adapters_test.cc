// Models of which a part trains: adapters by name and sizes, and files with frozen tensors or bytes.
#include "ebb/runtime/planner/adapters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/planner/activations.h"
#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/model_of_tensors.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/runtime/planner/named_machines.h"
#include "tests/status.h"

namespace ebb::planner::adapters_test {
namespace {

using ::ebb::testing::Says;

absl::StatusOr<Model> Adapted(const char* name, int64_t rank, std::vector<std::string> modules) {
  return WithAdapters(ModelOf(*ShapeOfName(name)), {.rank = rank, .modules = std::move(modules)});
}

// The counts that PEFT prints for these models ("trainable params: 39,976,960").
TEST(Adapters, TrainAsManyParametersAsPeftMakes) {
  struct Published {
    const char* model;
    int64_t rank;
    std::vector<std::string> modules;
    int64_t trained;
  };
  const std::vector<std::string> all = {"all-linear"}, queries = {"q_proj", "v_proj"};
  const Published kPublished[] = {{"llama-2-7b", 16, all, 39'976'960},
                                  {"llama-2-7b", 8, queries, 4'194'304},
                                  {"mistral-7b", 16, all, 41'943'040},
                                  {"llama-3-8b", 16, all, 41'943'040},
                                  {"llama-3-70b", 16, all, 207'093'760},
                                  // GPT-2's queries, keys and values are one matrix.
                                  {"gpt2", 8, {"c_attn"}, 294'912}};
  for (const auto& [name, rank, modules, trained] : kPublished) {
    ASSERT_OK_AND_ASSIGN(const Model model, Adapted(name, rank, modules));
    EXPECT_EQ(model.trained_parameters(), trained) << name;
    EXPECT_EQ(model.parameters(), ModelOf(*ShapeOfName(name)).parameters() + trained) << name;
  }
}

TEST(Adapters, AWrongModuleGetsTheModelsOwn) {
  EXPECT_THAT(Adapted("llama-2-7b", 8, {"q_prj"}), Says("did you mean q_proj", "all-linear"));
  EXPECT_THAT(Adapted("gpt2", 8, {"gate_proj"}),
              Says("it has down_proj, o_proj, qkv_proj, up_proj"));
}

// Each expert has adapters; a token pays for those that it goes through.
TEST(Adapters, OfExpertsAreOfEachExpert) {
  ASSERT_OK_AND_ASSIGN(const Model model, Adapted("mixtral-8x7b", 4, {"down_proj"}));
  EXPECT_EQ(model.trained_parameters(), int64_t{32} * 8 * 4 * (4096 + 14336));
  const Model whole = ModelOf(*ShapeOfName("mixtral-8x7b"));
  EXPECT_EQ(model.visits[1].products - whole.visits[1].products, 2.0 * 4 * (4096 + 14336));
  EXPECT_EQ(model.visits[1].kept - whole.visits[1].kept, 2 * 4);
}

// Frozen products have no gradient of a parameter, and backward ends at the first block: about two
// thirds of the operations are left.
TEST(Adapters, AFrozenBaseHasNoGradientsOfParameters) {
  const Pass pass{.context = 4096};
  const Model whole = ModelOf(*ShapeOfName("llama-2-7b"));
  ASSERT_OK_AND_ASSIGN(const Model model, Adapted("llama-2-7b", 16, {"all-linear"}));
  const double products = 4096 * 2.0 * (6'738'415'616 - 131'072'000 - 266'240),
               adapters = 4096 * 2.0 * 39'976'960;
  EXPECT_NEAR(FlopsOf(whole, pass) - FlopsOf(model, pass), products - 3 * adapters,
              1e-6 * products);
}

std::map<StateClass, double> GigabytesOf(const Model& model, const Choice& choice) {
  Question question{.model = model,
                    .machine = *MachineOfName("1xh100", /*whole_host=*/true),
                    .config = {},
                    .pass = {.context = 4096}};
  question.config.compute = DType::kBFloat16;
  question.config.micro_batch_size = question.config.gradient_accumulation_steps = 1;
  question.config.zero.offload_param.max_in_cpu = 0;
  const Answer answer = AnswerFor(question, choice, Depth::kMemory);
  EXPECT_OK(answer.refused);
  std::map<StateClass, double> bytes;
  for (const MemoryRow& row : answer.memory)
    bytes[row.state] += static_cast<double>(row.predicted_bytes) / 1e9;
  return bytes;
}

// 16 bytes for each parameter that trains, 2 for each frozen one, and 0.5625 for one of 4 bits.
TEST(Adapters, StatesAreOfWhatTrains) {
  ASSERT_OK_AND_ASSIGN(const Model model, Adapted("llama-2-7b", 16, {"all-linear"}));
  auto gigabytes = GigabytesOf(model, {});
  EXPECT_NEAR(gigabytes[StateClass::kParameter], 2 * (6.738 + 0.040), 0.01);
  EXPECT_NEAR(gigabytes[StateClass::kMaster], 4 * 0.040, 0.001);
  EXPECT_NEAR(gigabytes[StateClass::kOptimizer], 8 * 0.040, 0.001);
  const Model quantized = WithQuantizedBase(model);
  EXPECT_EQ(quantized.parameters(), model.parameters());
  EXPECT_EQ(quantized.trained_parameters(), model.trained_parameters());
  gigabytes = GigabytesOf(quantized, {});
  EXPECT_NEAR(gigabytes[StateClass::kParameter], 0.5625 * 6.476 + 2 * (0.262 + 0.040), 0.01);
  EXPECT_NEAR(gigabytes[StateClass::kMaster], 4 * 0.040, 0.001);
  // The largest matrix, in 16 bits, is made before its product.
  EXPECT_EQ(ActivationsOf(quantized, {.context = 1})->scratch -
                ActivationsOf(model, {.context = 1})->scratch,
            int64_t{2} * 4096 * 11008);
}

class FrozenFilesTest : public ::testing::Test {
 protected:
  ~FrozenFilesTest() override { std::filesystem::remove(path_); }
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
  };
  void Write(const std::vector<Tensor>& tensors,
             const std::map<std::string, std::string>& metadata = {}) const {
    SafetensorsHeader header{.tensors = {}, .metadata = metadata};
    int64_t end = 0;
    for (const auto& [name, dtype, shape] : tensors) {
      const int64_t bytes = Elements(shape) * (dtype == "U8" ? 1 : dtype == "F32" ? 4 : 2);
      header.tensors.push_back(
          {.name = name, .dtype = dtype, .shape = shape, .begin = end, .end = end + bytes});
      end += bytes;
    }
    const std::string prefix = SafetensorsPrefix(header, 64);
    std::ofstream(path_, std::ios::binary) << prefix;
    std::filesystem::resize_file(path_, prefix.size() + static_cast<size_t>(end));
  }
  absl::StatusOr<Model> Read(const std::string& trainable = "") const {
    return ModelOfSafetensors({&path_, 1}, trainable);
  }
  const std::string path_ =
      absl::StrCat(::testing::TempDir(), "/frozen-", getpid(), ".safetensors");
};

constexpr int64_t kAdapters = 4 * 64 + 256 * 4;  // elements of rank 4

TEST_F(FrozenFilesTest, AdaptersTrainByDefaultAndAnExpressionTakesOthers) {
  Write({{"embed_tokens.weight", "BF16", {1000, 64}},
         {"layers.0.up.base_layer.weight", "BF16", {256, 64}},
         {"layers.0.up.lora_A.default.weight", "BF16", {4, 64}},
         {"layers.0.up.lora_B.default.weight", "BF16", {256, 4}},
         {"layers.0.norm.weight", "BF16", {64}}});
  ASSERT_OK_AND_ASSIGN(const Model model, Read());
  EXPECT_EQ(model.trained_parameters(), kAdapters);
  EXPECT_THAT(model.trains, ::testing::HasSubstr("lora_"));
  // The output of the base with its adapter, and that of A.
  EXPECT_EQ(model.visits[1].kept, 256 + 4);
  EXPECT_EQ(model.visits[1].frozen_products, 256 * 64);
  ASSERT_OK_AND_ASSIGN(const Model norms, Read("norm|lora_A"));
  EXPECT_EQ(norms.trained_parameters(), 64 + 4 * 64);
  EXPECT_THAT(Read("nothing"), Says("--trainable", "in no name"));
  EXPECT_THAT(Read("(["), Says("--trainable"));
}

// A base has as many bytes as bitsandbytes stores, with its factors and tables; none is a matrix of n/2 rows.
TEST_F(FrozenFilesTest, BytesHaveNoOutputOfTheirOwn) {
  Write({{"embed_tokens.weight", "BF16", {1000, 64}},
         {"layers.0.up.base_layer.weight", "U8", {256 * 64 / 2, 1}},
         {"layers.0.up.base_layer.weight.absmax", "F32", {256}},
         {"layers.0.up.base_layer.weight.quant_map", "F32", {16}},
         {"layers.0.up.lora_A.weight", "BF16", {4, 64}},
         {"layers.0.up.lora_B.weight", "BF16", {256, 4}}});
  ASSERT_OK_AND_ASSIGN(const Model model, Read());
  EXPECT_EQ(model.trained_parameters(), kAdapters);
  EXPECT_EQ(model.visits[1].kept, 256 + 4);
  EXPECT_EQ(model.visits[1].products, 256 * 64 + kAdapters);
  EXPECT_EQ(model.visits[1].dequantized, 256 * 64);
  // Without adapters nothing says what the outputs are, and factors do not train.
  Write({{"embed_tokens.weight", "BF16", {1000, 64}},
         {"layers.0.up.weight", "U8", {256 * 64 / 2, 1}},
         {"layers.0.up.weight.absmax", "F32", {256}}});
  ASSERT_OK_AND_ASSIGN(const Model base, Read());
  EXPECT_EQ(base.visits[1].kept, 0);
  EXPECT_EQ(base.trained_parameters(), 64000);
}

TEST_F(FrozenFilesTest, WhatWriteShapesSaysIsTaken) {
  const std::vector<Tensor> tensors = {{"embed_tokens.weight", "BF16", {1000, 64}},
                                       {"layers.0.up.weight", "U8", {256 * 64 / 2, 1}},
                                       {"layers.0.norm.weight", "BF16", {64}}};
  Write(tensors, {{kFrozenKey, R"(["embed_tokens.weight", "layers.0.up.weight"])"},
                  {kShapesKey, R"({"layers.0.up.weight": [256, 64]})"}});
  ASSERT_OK_AND_ASSIGN(const Model model, Read());
  EXPECT_EQ(model.trained_parameters(), 64);
  EXPECT_EQ(model.parameters(), 64000 + 256 * 64 + 64);
  EXPECT_EQ(model.visits[1].kept, 256);
  for (const char* wrong : {"", "{}", "[1]", "[", "\"a\""}) {
    Write(tensors, {{kFrozenKey, wrong}});
    EXPECT_THAT(Read(), Says(kFrozenKey, path_));
  }
  for (const char* wrong : {"", "[]", R"({"a": 1})", R"({"a": []})", R"({"a": [0]})",
                            R"({"a": [9007199254740993, 9]})"}) {
    Write(tensors, {{kShapesKey, wrong}});
    EXPECT_THAT(Read(), Says(kShapesKey, path_));
  }
}

}  // namespace
}  // namespace ebb::planner::adapters_test
