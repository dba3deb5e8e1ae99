// Sizes of published models, and files that describe models: valid ones and broken ones.
#include "ebb/runtime/planner/model_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/planner/activations.h"
#include "ebb/runtime/planner/hugging_face_config.h"
#include "ebb/runtime/planner/model_of_tensors.h"

namespace ebb::planner {
namespace {

using ::testing::HasSubstr;

// As counted by their authors.
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
    EXPECT_TRUE(Complete(shape).ok()) << shape.name;
    const Model model = ModelOf(shape);
    const absl::StatusOr<ModelSpec> spec = SpecOf(model, {.context = 64});
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_TRUE(Validate(*spec).ok()) << Validate(*spec);
  }
}

TEST(ModelShape, AnUnknownNameIsToldTheNearest) {
  EXPECT_THAT(ShapeOfName("lama-2-7b").status().message(), HasSubstr("did you mean llama-2-7b"));
  EXPECT_FALSE(ShapeOfName(std::string(100'000, 'x')).ok());
  EXPECT_FALSE(ShapeOfName("").ok());
}

TEST(ModelShape, ImpossibleSizesAreNamed) {
  const auto wrong = [](ModelShape shape) {
    const auto complete = Complete(std::move(shape));
    return complete.ok() ? std::string() : std::string(complete.status().message());
  };
  const ModelShape small{.layers = 2, .width = 64, .heads = 4, .vocabulary = 100, .context = 16};
  EXPECT_EQ(wrong(small), "");
  ModelShape shape = small;
  shape.layers = 0;
  EXPECT_THAT(wrong(shape), HasSubstr("layers"));
  shape = small;
  shape.width = 65;
  EXPECT_THAT(wrong(shape), HasSubstr("not a multiple"));
  shape = small;
  shape.key_value_heads = 3;
  EXPECT_THAT(wrong(shape), HasSubstr("key-value-heads"));
  shape = small;
  shape.experts_of_token = 2;
  EXPECT_THAT(wrong(shape), HasSubstr("experts"));
  shape = small;
  shape.vocabulary = INT64_MAX;
  EXPECT_THAT(wrong(shape), HasSubstr("vocabulary"));
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
  const auto parameters = [](const char* text) {
    const auto shape = ShapeOfConfigJson(text, "config.json");
    EXPECT_TRUE(shape.ok()) << shape.status();
    return shape.ok() ? ModelOf(*shape).parameters() : 0;
  };
  EXPECT_EQ(parameters(R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
      "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
      "vocab_size": 128256, "max_position_embeddings": 8192, "rope_scaling": null})"),
            8'030'261'248);
  EXPECT_EQ(parameters(R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
      "n_positions": 1024, "n_inner": null, "vocab_size": 50257})"),
            124'439'808);
  EXPECT_EQ(parameters(R"({"model_type": "mixtral", "hidden_size": 4096,
      "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
      "num_experts_per_tok": 2, "tie_word_embeddings": false})"),
            46'702'792'704);
  EXPECT_EQ(parameters(R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
      "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
      "vocab_size": 151936, "tie_word_embeddings": true})"),
            494'032'768);
}

TEST(HuggingFaceConfig, SaysWhatIsWrong) {
  const auto message = [](const std::string& text) {
    return std::string(ShapeOfConfigJson(text, "f").status().message());
  };
  EXPECT_THAT(message("{}"), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(message(R"({"num_hidden_layers": "x"})"), HasSubstr("no whole number"));
  EXPECT_THAT(message(R"({"num_hidden_layers": 1e300})"), HasSubstr("no whole number"));
  EXPECT_THAT(message(R"({"num_hidden_layers": -1})"), HasSubstr("no whole number"));
  EXPECT_FALSE(message("[1]").empty());
  EXPECT_FALSE(message("{\"a\": 1").empty());
  EXPECT_FALSE(message(R"({"hidden_size": 1, "hidden_size": 2})").empty());
  EXPECT_FALSE(message(std::string(100'000, '[')).empty());
  EXPECT_FALSE(message(std::string("{\"a\": \"\xff\"}")).empty());
}

// Bytes of a good file replaced, cut or repeated: an error or a shape, never a crash.
TEST(HuggingFaceConfig, DamagedTextNeverCrashes) {
  const std::string good =
      R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
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
    const auto shape = ShapeOfConfigJson(text, "f");
    if (shape.ok())
      ModelOf({.layers = 1,
               .width = 8,
               .heads = 1,
               .key_value_heads = 1,
               .head_width = 8,
               .feed_forward = 8,
               .vocabulary = 8,
               .context = 8});
  }
}

class SafetensorsModelTest : public ::testing::Test {
 protected:
  ~SafetensorsModelTest() override { std::filesystem::remove(path_); }
  void Write(const std::vector<std::pair<std::string, std::vector<int64_t>>>& tensors) const {
    SafetensorsHeader header;
    int64_t end = 0;
    for (const auto& [name, shape] : tensors) {
      const int64_t bytes = 2 * Elements(shape);
      header.tensors.push_back(
          {.name = name, .dtype = "BF16", .shape = shape, .begin = end, .end = end + bytes});
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

  const std::string path_ = absl::StrCat(testing::TempDir(), "/planner-", getpid(), ".safetensors");
};

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
  const absl::StatusOr<Model> model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::string> names;
  for (const ModelUnit& unit : model->units) names.push_back(unit.name);
  EXPECT_THAT(names, testing::ElementsAre("before", "layers.0", "layers.2", "layers.10", "after"));
  EXPECT_EQ(model->width, 64);
  EXPECT_EQ(model->vocabulary, 1000);
  EXPECT_EQ(model->parameters(), 2 * 64000 + 3 * (256 * 64 + 64) + 64);
  // Each block's product is kept, the table costs nothing, the head does.
  EXPECT_EQ(model->visits[1].kept, 256);
  EXPECT_EQ(model->visits[0].products, 0);
  EXPECT_EQ(model->visits[4].products, 64000);
}

TEST_F(SafetensorsModelTest, BadFilesAreErrorsThatNameThem) {
  for (const std::string& bytes :
       {std::string(), std::string(7, '\0'), std::string(8, '\xff'),
        std::string("\2\0\0\0\0\0\0\0{}", 10), std::string("\1\0\0\0\0\0\0\0[", 9),
        std::string("\x40\0\0\0\0\0\0\0", 8) + std::string(64, '[')}) {
    WriteBytes(bytes);
    const absl::StatusOr<Model> model = Read();
    ASSERT_FALSE(model.ok());
    EXPECT_THAT(model.status().message(), HasSubstr(path_));
  }
  const std::string absent = path_ + ".absent";
  EXPECT_THAT(ModelOfSafetensors({&absent, 1}).status().message(), HasSubstr(absent));
}

TEST(ModelOfTensors, HugeShapesAreRefused) {
  EXPECT_FALSE(ModelOfTensors({{.name = "a", .shape = {INT64_MAX, 2}}}, "m").ok());
  EXPECT_FALSE(ModelOfTensors({{.name = "a", .shape = {int64_t{1} << 52}},
                               {.name = "b", .shape = {int64_t{1} << 52}},
                               {.name = "c", .shape = {2}}},
                              "m")
                   .ok());
  EXPECT_FALSE(ModelOfTensors({}, "m").ok());
  // A number that is no number of a block's, and one too long for it.
  EXPECT_TRUE(ModelOfTensors({{.name = "a.99999999999999999999.b", .shape = {2}}}, "m").ok());
}

}  // namespace
}  // namespace ebb::planner
