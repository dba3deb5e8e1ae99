// Sizes of published models, and files that describe models: valid ones and broken ones.
#include "ebb/runtime/planner/model_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/planner/activations.h"
#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/hugging_face_config.h"
#include "ebb/runtime/planner/model_of_tensors.h"
#include "ebb/runtime/planner/named_machines.h"
#include "nlohmann/json.hpp"
#include "tests/status.h"

namespace ebb::planner::model_shape_test {
namespace {

using ::ebb::testing::Says;

// Published counts of the models' authors.
TEST(ModelShape, NamedModelsHaveTheirPublishedParameters) {
  const std::pair<const char*, int64_t> kPublished[] = {
      {"gpt2", 124'439'808},           {"gpt2-xl", 1'557'611'200},
      {"llama-2-7b", 6'738'415'616},   {"llama-2-13b", 13'015'864'320},
      {"llama-2-70b", 68'976'648'192}, {"llama-3-8b", 8'030'261'248},
      {"llama-3-70b", 70'553'706'496}, {"mixtral-8x7b", 46'702'792'704},
      {"mistral-7b", 7'241'732'096},   {"qwen2.5-0.5b", 494'032'768},
      {"qwen2.5-7b", 7'615'616'512},   {"qwen2.5-72b", 72'706'203'648},
      {"qwen3-8b", 8'190'735'360},     {"qwen3-30b-a3b", 30'532'122'624}};
  for (const auto& [name, parameters] : kPublished)
    EXPECT_EQ(ModelOf(*ShapeOfName(name)).parameters(), parameters) << name;
}

TEST(ModelShape, EveryNamedShapeIsCompleteAndMakesAModel) {
  for (const ModelShape& shape : NamedShapes()) {
    EXPECT_OK(Complete(shape));
    ASSERT_OK_AND_ASSIGN(const ModelSpec spec, SpecOf(ModelOf(shape), {.context = 64}));
    EXPECT_OK(Validate(spec));
  }
}

TEST(ModelShape, AnUnknownNameGetsTheNearestOne) {
  EXPECT_THAT(ShapeOfName("lama-2-7b"), Says("did you mean llama-2-7b"));
  EXPECT_FALSE(ShapeOfName(std::string(100'000, 'x')).ok());
  EXPECT_FALSE(ShapeOfName("").ok());
}

TEST(ModelShape, ImpossibleSizesAreNamed) {
  const ModelShape small{.layers = 2, .width = 64, .heads = 4, .vocabulary = 100, .context = 16};
  EXPECT_OK(Complete(small));
  struct Wrong {
    int64_t ModelShape::*size;
    int64_t number;
    const char* message;
  };
  // Sizes are not derived from a width that is out of range.
  for (const auto& [size, number, message] :
       {Wrong{&ModelShape::layers, 0, "layers"}, Wrong{&ModelShape::width, 65, "not a multiple"},
        Wrong{&ModelShape::key_value_heads, 3, "key-value-heads"},
        Wrong{&ModelShape::experts_of_token, 2, "experts"},
        Wrong{&ModelShape::vocabulary, INT64_MAX, "vocabulary"},
        Wrong{&ModelShape::width, 4'000'000'000'000'000'000, "width is 4000000000000000000"},
        Wrong{&ModelShape::layers, kUnitsMax, "from 1 to 1998"}}) {
    ModelShape shape = small;
    shape.*size = number;
    EXPECT_THAT(Complete(shape), Says(message));
  }
}

TEST(ModelShape, APositionTableGrowsWithALongerContext) {
  Model gpt2 = ModelOf(*ShapeOfName("gpt2")), llama = ModelOf(*ShapeOfName("llama-2-7b"));
  const int64_t before = gpt2.parameters(), same = llama.parameters();
  gpt2.GrowPositions(512);
  EXPECT_EQ(gpt2.parameters(), before);
  gpt2.GrowPositions(4096);
  EXPECT_EQ(gpt2.parameters(), before + (4096 - 1024) * 768);
  llama.GrowPositions(1 << 20);
  EXPECT_EQ(llama.parameters(), same);
}

// Products of the largest sizes would not fit 64 bits: they are refused, not computed.
TEST(ModelShape, SizesBeyondAllMemoryAreRefused) {
  EXPECT_FALSE(Complete({.layers = 100'000,
                         .width = 1 << 22,
                         .heads = 1 << 12,
                         .feed_forward = 1 << 24,
                         .vocabulary = 1 << 24,
                         .context = 1,
                         .experts = 1 << 14,
                         .experts_of_token = 1})
                   .ok());
  const ModelShape shape = *Complete({.layers = 1000,
                                      .width = 1 << 16,
                                      .heads = 1 << 9,
                                      .vocabulary = 1 << 20,
                                      .context = 1 << 28});
  EXPECT_FALSE(ActivationsOf(ModelOf(shape), {.sequences = 1 << 20, .context = 1 << 28}).ok());
}

TEST(HuggingFaceConfig, GivesTheShapeOfEachFamily) {
  // GPT-2's class has 1024 positions. Gemma's has a tied head, and heads of 256.
  const std::pair<const char*, int64_t> kFiles[] = {
      {R"("model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "vocab_size": 128256, "max_position_embeddings": 8192, "rope_scaling": null)",
       8'030'261'248},
      {R"("model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
          "n_inner": null, "vocab_size": 50257)",
       124'439'808},
      {R"("model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257)",
       124'439'808},
      {R"("model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
          "tie_word_embeddings": false)",
       46'702'792'704},
      {R"("model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
          "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
          "vocab_size": 151936, "tie_word_embeddings": true)",
       494'032'768},
      {R"("model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
          "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
          "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
          "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
          "attention_bias": false, "tie_word_embeddings": false)",
       30'532'122'624},
      {R"("model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
          "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
          "vocab_size": 256000)",
       2'506'172'416}};
  for (const auto& [keys, parameters] : kFiles) {
    ASSERT_OK_AND_ASSIGN(const ModelShape shape,
                         ShapeOfConfigJson(absl::StrCat("{", keys, "}"), "config.json"));
    EXPECT_EQ(ModelOf(shape).parameters(), parameters) << keys;
  }
}

// Random configs of each type, with the parameters that transformers makes of them:
// hugging_face_counts.py writes the file.
TEST(HuggingFaceConfig, CountsWhatTransformersMakes) {
  std::ifstream file(EBB_PLANNER_TESTS "/hugging_face_counts.json");
  const auto rows = nlohmann::json::parse(file);
  ASSERT_GE(rows.size(), 160u);
  for (const auto& row : rows) {
    const std::string text = row["config"].dump();
    const absl::StatusOr<ModelShape> shape = ShapeOfConfigJson(text, "config.json");
    ASSERT_TRUE(shape.ok()) << text << shape.status();
    EXPECT_EQ(ModelOf(*shape).parameters(), row["parameters"]) << text;
  }
}

// The published sizes of models with latent attention, shared experts, or four norms a block.
TEST(HuggingFaceConfig, CountsPublishedModels) {
  const std::pair<const char*, double> kFiles[] = {
      {R"("model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
          "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
          "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
          "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
          "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
          "vocab_size": 129280, "max_position_embeddings": 163840, "tie_word_embeddings": false)",
       671.0e9},
      {R"("model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
          "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096)",
       9.24e9},
      {R"("model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
          "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32064)",
       3.82e9},
      {R"("model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
          "num_attention_heads": 71, "vocab_size": 65024, "multi_query": true)",
       6.92e9}};
  for (const auto& [keys, parameters] : kFiles) {
    ASSERT_OK_AND_ASSIGN(const ModelShape shape,
                         ShapeOfConfigJson(absl::StrCat("{", keys, "}"), "config.json"));
    EXPECT_NEAR(static_cast<double>(ModelOf(shape).parameters()), parameters, 0.002 * parameters)
        << keys;
  }
}

// Bytes of a token that torch keeps of transformers' models in bf16, with SDPA and 1,024 tokens:
// under eager torch as ebb.count_activations counts them, without and with checkpointing; compiled as
// the partitioner saves them for backward, without the logits' gradient.
// tests/python/torch_activations_test.py counts them again.
TEST(Activations, AreWhatTorchKeeps) {
  std::ifstream file(EBB_PLANNER_TESTS "/torch_activations.json");
  int architectures = 0;
  for (const auto& row : nlohmann::json::parse(file)) {
    ASSERT_OK_AND_ASSIGN(const ModelShape shape,
                         ShapeOfConfigJson(row["config"].dump(), "config.json"));
    const auto expect = [&](const char* key, Pass pass, double without) {
      if (!row.contains(key)) return;
      pass.context = 1024;
      pass.torch = true;
      const double bytes = row[key];
      EXPECT_NEAR(
          static_cast<double>(ActivationsOf(ModelOf(shape), pass)->workspace()) / 1024 - without,
          bytes, 0.1 * bytes)
          << key << " " << row;
    };
    expect("eager", {}, 0);
    expect("recomputed", {.recompute = true}, 0);
    expect("compiled", {.compiled = true}, 2 * 4096);
    architectures += row.contains("eager") ? 1 : 0;
  }
  EXPECT_EQ(architectures, 8);
  // A small vocabulary: the peak is in a block's backward.
  ModelShape small = *Complete({.layers = 4,
                                .width = 512,
                                .heads = 8,
                                .key_value_heads = 2,
                                .feed_forward = 1408,
                                .vocabulary = 64,
                                .context = 1024});
  EXPECT_NEAR(static_cast<double>(
                  ActivationsOf(ModelOf(small), {.context = 1024, .torch = true})->workspace()) /
                  1024,
              4 * 22056 + 12609, 0.02 * (4 * 22056 + 12609));
}

// A token of a layer with a window attends to fewer positions; of a short context to all.
TEST(HuggingFaceConfig, AWindowSavesOperationsOfLongContexts) {
  ModelShape shape = *Complete({.layers = 6,
                                .width = 64,
                                .heads = 4,
                                .vocabulary = 100,
                                .context = 1 << 16,
                                .window = 128,
                                .whole_every = 6});
  const Model windowed = ModelOf(shape);
  shape.window = 0;
  const Model whole = ModelOf(shape);
  EXPECT_EQ(FlopsOf(windowed, {.context = 128}), FlopsOf(whole, {.context = 128}));
  // In five of six layers 128 positions for each token but the first 128, not half of 8,192.
  const double products = 2 * 4 * 16, tokens = 8192,
               saved = 3 * 2 * tokens * products * 5 * (4096 - (128 - 1));
  EXPECT_NEAR(FlopsOf(whole, {.context = 8192}) - FlopsOf(windowed, {.context = 8192}), saved,
              1e-9 * saved);
}

TEST(HuggingFaceConfig, OfAMultimodalModelOnlyTheTextIsCountedAndTheNameSaysSo) {
  ASSERT_OK_AND_ASSIGN(const ModelShape shape,
                       ShapeOfConfigJson(R"({"model_type": "llava", "vision_config": {},
      "tie_word_embeddings": true,
      "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
      "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}})",
                                         "config.json"));
  EXPECT_EQ(shape.name, "config.json, only its text_config");
  EXPECT_TRUE(shape.tied_head) << "by the whole model's value; the text has none";
}

// A count as Llama would be wrong by up to a third.
TEST(HuggingFaceConfig, RefusesModelsThatItWouldCountWrongly) {
  const auto with = [](const std::string& keys) {
    return ShapeOfConfigJson(absl::StrCat(R"({"hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100, )",
                                          keys, "}"),
                             "f");
  };
  EXPECT_OK(with(R"("model_type": "llama", "attention_bias": false, "mlp_bias": null)"));
  for (const std::string type :
       {"gpt_bigcode", "opt", "bloom", "mamba", "deepseek_v4", "qwen3_next"})
    EXPECT_THAT(with(absl::StrCat("\"model_type\": \"", type, "\"")),
                Says(type, "qwen3, gemma", "--safetensors"));
  for (const std::string key :
       {"\"add_cross_attention\": true", "\"num_local_experts\": 8", "\"n_shared_experts\": 1",
        "\"decoder_sparse_step\": 2", "\"mlp_only_layers\": [1]"})
    EXPECT_THAT(with("\"model_type\": \"llama\", " + key), Says(key.substr(0, key.find(':'))));
  for (const std::string key : {"\"attention_bias\": true", "\"mlp_bias\": true"})
    EXPECT_THAT(with("\"model_type\": \"mistral\", " + key), Says(key.substr(0, key.find(':'))));
  // A router of one expert, or a dense block of another width. Qwen3-MoE's class has a default for
  // the width of an expert, which is not that of a dense block.
  const std::pair<const char*, const char*> kExperts[] = {
      {R"("mixtral", "num_local_experts": 8)", "num_experts_per_tok"},
      {R"("mixtral", "num_local_experts": 1, "num_experts_per_tok": 1)", "experts of a block: 1,"},
      {R"("qwen3_moe", "num_experts": 0, "num_experts_per_tok": 1, "moe_intermediate_size": 32)",
       "experts of a block: 0,"},
      {R"("qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2)",
       "\"moe_intermediate_size\" is missing"}};
  for (const auto& [keys, message] : kExperts)
    EXPECT_THAT(with(absl::StrCat("\"model_type\": ", keys)), Says(message));
}

TEST(HuggingFaceConfig, NamesTheError) {
  const std::pair<std::string, const char*> kWrong[] = {
      {"{}", "\"model_type\" is missing"},
      {R"({"model_type": "llama"})", "num_hidden_layers"},
      {R"({"model_type": "gpt2"})", "\"n_layer\" is missing"},
      {R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1})",
       "\"vocab_size\" is missing"},
      {R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
           "num_attention_heads": 4, "vocab_size": 100})",
       "\"intermediate_size\" is missing"},
      {R"({"model_type": "llama", "num_hidden_layers": "x"})", "must be a whole number"},
      {R"({"model_type": "llama", "num_hidden_layers": 1e300})", "must be a whole number"},
      {R"({"model_type": "llama", "num_hidden_layers": -1})", "must be a whole number"},
      {"[1]", ""},
      {"{\"a\": 1", ""},
      {R"({"hidden_size": 1, "hidden_size": 2})", ""},
      {std::string(100'000, '['), ""},
      {"{\"a\": \"\xff\"}", ""}};
  for (const auto& [text, message] : kWrong)
    EXPECT_THAT(ShapeOfConfigJson(text, "f"), Says(message)) << text.substr(0, 100);
}

// Bytes of a good file are replaced, cut or repeated: there is an error or a shape, never a crash.
TEST(HuggingFaceConfig, DamagedTextNeverCrashes) {
  const std::string good =
      R"({"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
          "vocab_size": 100, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2})";
  std::mt19937 random(7);
  for (int n = 0; n < 3000; ++n) {
    std::string text = good;
    for (unsigned change = random() % 4 + 1; change > 0; --change) {
      const size_t at = random() % text.size();
      if (random() % 3 == 0) {
        text.insert(at, text.substr(random() % text.size(), 9));
      } else {
        text[at] = static_cast<char>(random() % 5 == 0 ? random() % 256 : '0' + random() % 10);
      }
    }
    (void)ShapeOfConfigJson(text, "f");
  }
}

class SafetensorsModelTest : public ::testing::Test {
 protected:
  ~SafetensorsModelTest() override { std::filesystem::remove(path_); }
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;
    std::string dtype = "BF16";
  };
  void Write(const std::vector<Tensor>& tensors) const {
    constexpr std::pair<const char*, int64_t> kSizes[] = {{"BF16", 2}, {"F16", 2}, {"F32", 4},
                                                          {"F64", 8},  {"U8", 1},  {"I32", 4}};
    SafetensorsHeader header;
    int64_t end = 0;
    for (const Tensor& tensor : tensors) {
      const auto size = std::find_if(std::begin(kSizes), std::end(kSizes),
                                     [&](const auto& each) { return tensor.dtype == each.first; });
      const int64_t bytes = size->second * Elements(tensor.shape);
      header.tensors.push_back({.name = tensor.name,
                                .dtype = tensor.dtype,
                                .shape = tensor.shape,
                                .begin = end,
                                .end = end + bytes});
      end += bytes;
    }
    const std::string prefix = SafetensorsPrefix(header, 64);
    std::ofstream(path_, std::ios::binary) << prefix;
    std::filesystem::resize_file(path_, prefix.size() + static_cast<size_t>(end));
  }
  void WriteBytes(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  absl::StatusOr<Model> Read() const { return ModelOfSafetensors({&path_, 1}); }

  const std::string path_ =
      absl::StrCat(::testing::TempDir(), "/planner-", getpid(), ".safetensors");
};

TEST_F(SafetensorsModelTest, AnIndexStandsForItsFiles) {
  Write({{"a.weight", {64, 64}}, {"b.weight", {8, 64}}});
  const std::string index = path_ + ".index.json";
  const auto parameters = [&](const std::string& file) {
    std::ofstream(index) << R"({"weight_map": {"a.weight": ")" << file << R"(", "b.weight": ")"
                         << file << "\"}}";
    return ModelOfSafetensors({&index, 1});
  };
  ASSERT_OK_AND_ASSIGN(const Model model, parameters(std::filesystem::path(path_).filename()));
  EXPECT_EQ(model.parameters(), 64 * 64 + 8 * 64);
  EXPECT_EQ(model.name, index);
  EXPECT_THAT(parameters("../x.safetensors"), Says("not the plain name"));
  std::filesystem::remove(index);
}

TEST_F(SafetensorsModelTest, BlocksAreUnitsInTheirOrder) {
  Write({{"model.embed_tokens.weight", {1000, 64}},
         {"model.layers.0.mlp.weight", {256, 64}},
         {"model.layers.0.norm.weight", {64}},
         {"model.layers.10.mlp.weight", {256, 64}},
         {"model.layers.10.norm.weight", {64}},
         {"model.layers.2.mlp.weight", {256, 64}},
         {"model.layers.2.norm.weight", {64}},
         {"model.norm.weight", {64}},
         {"lm_head.weight", {1000, 64}}});
  ASSERT_OK_AND_ASSIGN(const Model model, Read());
  std::vector<std::string> names;
  for (const ModelUnit& unit : model.units) names.push_back(unit.name);
  EXPECT_THAT(names,
              ::testing::ElementsAre("before", "layers.0", "layers.2", "layers.10", "after"));
  EXPECT_EQ(model.width, 64);
  EXPECT_EQ(model.vocabulary, 1000);
  EXPECT_EQ(model.parameters(), 2 * 64000 + 3 * (256 * 64 + 64) + 64);
  // The output of each block's product is kept. The table has no operations, and the head has.
  EXPECT_EQ(model.visits[1].kept, 256);
  EXPECT_EQ(model.visits[0].products, 0);
  EXPECT_EQ(model.visits[4].products, 64000);
}

TEST_F(SafetensorsModelTest, GptTwosMasksAreNoParametersAndItsTableIsTheHead) {
  Write({{"wte.weight", {1000, 64}},
         {"wpe.weight", {128, 64}},
         {"h.0.attn.bias", {1, 1, 128, 128}},
         {"h.0.attn.masked_bias", {}},
         {"h.0.mlp.c_fc.weight", {64, 256}},
         {"h.0.ln_1.weight", {64}},
         {"ln_f.weight", {64}}});
  ASSERT_OK_AND_ASSIGN(const Model model, Read());
  EXPECT_EQ(model.parameters(), (1000 + 128) * 64 + 64 * 256 + 64 + 64);
  EXPECT_EQ(model.visits.front().products, 0);  // both tables are looked up
  EXPECT_EQ(model.visits.back().unit, 0);
  EXPECT_EQ(model.visits.back().products, 64000);
}

TEST_F(SafetensorsModelTest, TensorsOfSeveralDTypesAreCountedAsTheyAre) {
  // Multiples of 4,096 elements, so that none is padded.
  Write({{"model.embed_tokens.weight", {1024, 64}},
         {"model.layers.0.mlp.weight", {256, 64}},
         {"model.layers.0.router.weight", {64, 64}, "F32"},
         {"model.layers.0.base.qweight", {64, 64}, "I32"},
         {"model.layers.0.base.scale", {4096}, "F64"},
         {"lm_head.weight", {1024, 64}}});
  ASSERT_OK_AND_ASSIGN(const Model model, Read());
  EXPECT_THAT(model.stored_bytes,
              ::testing::UnorderedElementsAre(::testing::Pair("BF16", 2 * (2 * 65536 + 256 * 64)),
                                              ::testing::Pair("F32", 4 * 4096),
                                              ::testing::Pair("I32", 4 * 4096),
                                              ::testing::Pair("F64", 8 * 4096)));
  // By class, of one rank.
  const auto counted = [&](DType compute) {
    Question question{.model = model,
                      .machine = *MachineOfName("8xh100"),
                      .ranks = 1,
                      .config = {},
                      .pass = {.context = 8}};
    question.config.compute = compute;
    question.config.micro_batch_size = question.config.gradient_accumulation_steps = 1;
    const Answer answer = AnswerFor(question, Choice{}, Depth::kTimeAndPeak);
    EXPECT_TRUE(answer.refused.ok()) << answer.refused;
    EXPECT_TRUE(answer.time && answer.time->tokens_per_second > 0);
    std::map<StateClass, uint64_t> bytes;
    for (const MemoryRow& row : answer.memory) bytes[row.state] += row.predicted_bytes;
    return bytes;
  };
  constexpr uint64_t kTrained = 2 * 65536 + 256 * 64 + 4096, kRouter = 4096, kBase = 4 * 4096;
  // The router keeps fp32 and is its own master, the base keeps its bytes, a double gets the
  // compute dtype.
  std::map<StateClass, uint64_t> bytes = counted(DType::kBFloat16);
  EXPECT_EQ(bytes[StateClass::kParameter], 2 * kTrained + 4 * kRouter + kBase);
  EXPECT_EQ(bytes[StateClass::kMaster], 4 * kTrained);
  // No tensor is stored in the compute dtype: all get it.
  bytes = counted(DType::kFloat16);
  EXPECT_EQ(bytes[StateClass::kParameter], 2 * (kTrained + kRouter) + kBase);
  EXPECT_EQ(bytes[StateClass::kMaster], 4 * (kTrained + kRouter));
}

TEST_F(SafetensorsModelTest, ExpertsAreRefusedWithTheWayOut) {
  Write({{"model.embed_tokens.weight", {1000, 64}},
         {"model.layers.0.mlp.experts.3.up_proj.weight", {256, 64}}});
  EXPECT_THAT(Read(), Says("experts.3", "--config-json"));
}

TEST_F(SafetensorsModelTest, ALinkIsFollowedAsHuggingFacesCacheHasThem) {
  Write({{"model.embed_tokens.weight", {1000, 64}}});
  const std::string link = path_ + ".link";
  std::filesystem::create_symlink(path_, link);
  EXPECT_TRUE(ModelOfSafetensors({&link, 1}).ok());
  std::filesystem::remove(link);
}

TEST_F(SafetensorsModelTest, BadFilesAreErrorsThatNameThem) {
  for (const std::string& bytes :
       {std::string(), std::string(7, '\0'), std::string(8, '\xff'),
        std::string("\2\0\0\0\0\0\0\0{}", 10), std::string("\1\0\0\0\0\0\0\0[", 9),
        std::string("\x40\0\0\0\0\0\0\0", 8) + std::string(64, '[')}) {
    WriteBytes(bytes);
    EXPECT_THAT(Read(), Says(path_));
  }
  const std::string absent = path_ + ".absent";
  EXPECT_THAT(ModelOfSafetensors({&absent, 1}), Says(absent));
}

TEST(ModelOfTensors, HugeShapesAreRefused) {
  EXPECT_FALSE(ModelOfTensors({{.name = "a", .shape = {INT64_MAX, 2}}}, "m").ok());
  EXPECT_FALSE(ModelOfTensors({{.name = "a", .shape = {int64_t{1} << 52}},
                               {.name = "b", .shape = {int64_t{1} << 52}},
                               {.name = "c", .shape = {2}}},
                              "m")
                   .ok());
  EXPECT_FALSE(ModelOfTensors({}, "m").ok());
  std::vector<ModelTensor> many;
  for (int64_t block = 0; block <= kUnitsMax; ++block)
    many.push_back({.name = absl::StrCat("layers.", block, ".w"), .shape = {2}});
  EXPECT_THAT(ModelOfTensors(many, "m"), Says("takes at most 2000"));
  // A number that is too long to be the number of a block.
  EXPECT_TRUE(ModelOfTensors({{.name = "a.99999999999999999999.b", .shape = {2}}}, "m").ok());
}

}  // namespace
}  // namespace ebb::planner::model_shape_test
