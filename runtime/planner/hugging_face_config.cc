#include "ebb/runtime/planner/hugging_face_config.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/document.h"

namespace ebb::planner {
namespace {

using config::Json;

// A model_type with parameters that are counted exactly.
struct Family {
  const char* type;
  ModelShape shape = {};  // its parts, and the sizes that Hugging Face's class has for missing keys
  bool has_experts = false;
  bool has_expert_width = false;      // a key of its own for the width inside an expert
  bool derives_feed_forward = false;  // without a key: 4 widths
  std::string_view knows = "";        // keys that add parameters, which `finish` reads
  // Takes the keys that only this family has.
  absl::Status (*finish)(const Json& root, ModelShape& shape) = nullptr;
};

absl::StatusOr<int64_t> NumberOf(const Json& root, const char* name, int64_t otherwise) {
  if (!root.contains(name) || root[name].is_null()) return otherwise;
  const auto number = config::ToInteger(root[name]);
  if (!number || *number < 0 || *number > int64_t{1} << 40)
    return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is ", config::Shown(root[name]),
                                                   ": it must be a whole number, 0 or above"));
  return *number;
}
bool Flag(const Json& root, const char* name, bool otherwise) {
  return root.contains(name) && root[name].is_boolean() ? root[name].get<bool>() : otherwise;
}
absl::Status Refused(const Json& root, const char* key) {
  return absl::UnimplementedError(
      absl::StrCat("\"", key, "\" is ", config::Shown(root[key]),
                   ", which is not counted: give the model's files to --safetensors (in Python, "
                   "ebb.write_shapes writes one)"));
}

// A window that all layers have, or all but every n-th.
absl::Status ReadWindow(const Json& root, ModelShape& shape) {
  EBB_ASSIGN_OR_RETURN(shape.window, NumberOf(root, "sliding_window", shape.window));
  if (shape.whole_every > 1) {
    EBB_ASSIGN_OR_RETURN(shape.whole_every,
                         NumberOf(root, "sliding_window_pattern", shape.whole_every));
  }
  return absl::OkStatus();
}
constexpr int64_t kNever = 1 << 20;  // whole_every, if no layer sees all
absl::Status FinishFalcon(const Json& root, ModelShape& shape) {
  const bool is_new = Flag(root, "new_decoder_architecture", false);
  if (!is_new) shape.key_value_heads = Flag(root, "multi_query", true) ? 1 : shape.heads;
  if (is_new && shape.key_value_heads == 0) shape.key_value_heads = shape.heads;
  EBB_ASSIGN_OR_RETURN(const int64_t norms,
                       NumberOf(root, "num_ln_in_parallel_attn", is_new ? 2 : 1));
  shape.block_norms = !Flag(root, "parallel_attn", true) || norms == 2 ? 2 : 1;
  shape.query_biases = shape.projection_bias = shape.feed_forward_biases =
      Flag(root, "bias", false);
  return absl::OkStatus();
}
absl::Status FinishGptNeox(const Json& root, ModelShape& shape) {
  shape.key_value_heads = shape.heads;  // it reads no other key
  shape.query_biases = shape.projection_bias = Flag(root, "attention_bias", true);
  return absl::OkStatus();
}
absl::Status FinishPhi(const Json& root, ModelShape&) {
  return Flag(root, "qk_layernorm", false) ? Refused(root, "qk_layernorm") : absl::OkStatus();
}
absl::Status FinishStableLm(const Json& root, ModelShape& shape) {
  if (Flag(root, "qk_layernorm", false)) return Refused(root, "qk_layernorm");
  shape.query_biases = Flag(root, "use_qkv_bias", false);
  shape.block_norms = Flag(root, "use_parallel_residual", false) ? 1 : 2;
  return absl::OkStatus();
}
absl::Status FinishStarcoder2(const Json& root, ModelShape& shape) {
  shape.query_biases = shape.projection_bias = shape.feed_forward_biases =
      Flag(root, "use_bias", true);
  return absl::OkStatus();
}
absl::Status FinishQueryBiases(const Json& root, ModelShape& shape) {
  shape.query_biases = Flag(root, "attention_bias", false);
  return absl::OkStatus();
}
absl::Status FinishAllBiases(const Json& root, ModelShape& shape) {
  shape.query_biases = shape.projection_bias = Flag(root, "attention_bias", false);
  return absl::OkStatus();
}
absl::Status FinishCohere(const Json& root, ModelShape& shape) {
  EBB_RETURN_IF_ERROR(FinishAllBiases(root, shape));
  return Flag(root, "use_qk_norm", false) ? Refused(root, "use_qk_norm") : absl::OkStatus();
}
absl::Status FinishLlama(const Json& root, ModelShape& shape) {
  EBB_RETURN_IF_ERROR(FinishAllBiases(root, shape));
  shape.feed_forward_biases = Flag(root, "mlp_bias", false);
  return absl::OkStatus();
}
absl::Status FinishQwen2Moe(const Json& root, ModelShape& shape) {
  EBB_ASSIGN_OR_RETURN(shape.shared_feed_forward,
                       NumberOf(root, "shared_expert_intermediate_size", 5632));
  shape.query_biases = Flag(root, "qkv_bias", true);
  return absl::OkStatus();
}
// The first layers have a dense feed-forward layer; shared experts are as wide as others.
absl::Status ReadDenseLayers(const Json& root, int64_t layers, int64_t shared, ModelShape& shape) {
  EBB_ASSIGN_OR_RETURN(shape.dense_layers, NumberOf(root, "first_k_dense_replace", layers));
  EBB_ASSIGN_OR_RETURN(shape.dense_feed_forward, NumberOf(root, "intermediate_size", 0));
  EBB_ASSIGN_OR_RETURN(const int64_t experts, NumberOf(root, "n_shared_experts", shared));
  if (experts > 1 << 14 || shape.feed_forward > 1 << 24)
    return absl::InvalidArgumentError("\"n_shared_experts\" or their width is too large");
  shape.shared_feed_forward = experts * shape.feed_forward;
  return absl::OkStatus();
}
absl::Status FinishDeepSeek(const Json& root, ModelShape& shape) {
  if (Flag(root, "attention_bias", false)) return Refused(root, "attention_bias");
  if (root.contains("moe_layer_freq") && root["moe_layer_freq"] != 1)
    return Refused(root, "moe_layer_freq");
  EBB_ASSIGN_OR_RETURN(shape.query_rank,
                       NumberOf(root, "q_lora_rank", root.contains("q_lora_rank") ? 0 : 1536));
  EBB_ASSIGN_OR_RETURN(shape.key_value_rank, NumberOf(root, "kv_lora_rank", 512));
  EBB_ASSIGN_OR_RETURN(shape.rotary_width, NumberOf(root, "qk_rope_head_dim", 64));
  EBB_ASSIGN_OR_RETURN(const int64_t others, NumberOf(root, "qk_nope_head_dim", 128));
  EBB_ASSIGN_OR_RETURN(shape.value_width, NumberOf(root, "v_head_dim", 128));
  shape.head_width = shape.rotary_width + others;
  shape.key_value_heads = shape.heads;
  return absl::OkStatus();
}
absl::Status FinishDeepSeek2(const Json& root, ModelShape& shape) {
  EBB_RETURN_IF_ERROR(FinishDeepSeek(root, shape));
  return ReadDenseLayers(root, 0, 2, shape);
}
absl::Status FinishDeepSeek3(const Json& root, ModelShape& shape) {
  EBB_RETURN_IF_ERROR(FinishDeepSeek(root, shape));
  return ReadDenseLayers(root, 3, 1, shape);
}
absl::Status FinishGlm4Moe(const Json& root, ModelShape& shape) {
  shape.query_biases = Flag(root, "attention_bias", false);
  shape.query_norms = Flag(root, "use_qk_norm", false);
  return ReadDenseLayers(root, 1, 1, shape);
}
absl::Status FinishGptOss(const Json& root, ModelShape& shape) {
  shape.query_biases = shape.projection_bias = Flag(root, "attention_bias", true);
  return ReadWindow(root, shape);
}

// Norms with biases.
void AddWithLayerNorm(std::vector<Family>& families) {
  const ModelShape gpt2 = ModelShape::Gpt2({.context = 1024, .tied_head = true});
  ModelShape neox = ModelShape::Gpt2({.context = 2048});
  neox.learned_positions = false;
  ModelShape phi = neox;
  phi.block_norms = 1;
  phi.head_bias = true;
  phi.joined_queries = false;
  ModelShape falcon = neox;
  falcon.tied_head = true;
  ModelShape starcoder = neox;
  starcoder.joined_queries = false;
  starcoder.tied_head = true;
  starcoder.key_value_heads = 2;
  starcoder.context = 4096;
  constexpr std::string_view biases = "attention_bias";
  families.push_back({.type = "gpt2", .shape = gpt2, .derives_feed_forward = true});
  families.push_back({.type = "phi", .shape = phi, .finish = FinishPhi});
  families.push_back({.type = "gpt_neox", .shape = neox, .knows = biases, .finish = FinishGptNeox});
  families.push_back(
      {.type = "falcon", .shape = falcon, .derives_feed_forward = true, .finish = FinishFalcon});
  families.push_back({.type = "starcoder2", .shape = starcoder, .finish = FinishStarcoder2});
  families.push_back({.type = "stablelm",
                      .shape = {.key_value_heads = 32, .context = 4096, .norm_biases = true},
                      .finish = FinishStableLm});
}

void AddExperts(std::vector<Family>& families) {
  constexpr std::string_view biases = "attention_bias";
  families.push_back(
      {.type = "mixtral", .shape = {.key_value_heads = 8, .context = 131072}, .has_experts = true});
  families.push_back({.type = "qwen3_moe",
                      .shape = {.key_value_heads = 4, .context = 32768, .query_norms = true},
                      .has_experts = true,
                      .has_expert_width = true,
                      .knows = biases,
                      .finish = FinishAllBiases});
  families.push_back({.type = "qwen2_moe",
                      .shape = {.key_value_heads = 16,
                                .context = 32768,
                                .query_biases = true,
                                .shared_gate = true},
                      .has_experts = true,
                      .has_expert_width = true,
                      .knows = "shared_expert_intermediate_size",
                      .finish = FinishQwen2Moe});
  families.push_back({.type = "glm4_moe",
                      .shape = {.key_value_heads = 8, .head_width = 128, .context = 131072},
                      .has_experts = true,
                      .has_expert_width = true,
                      .knows = "attention_bias n_shared_experts",
                      .finish = FinishGlm4Moe});
  families.push_back({.type = "gpt_oss",
                      .shape = {.key_value_heads = 8,
                                .head_width = 64,
                                .context = 131072,
                                .feed_forward_biases = true,
                                .sinks = true,
                                .router_bias = true,
                                .window = 128,
                                .whole_every = 2},
                      .has_experts = true,
                      .knows = biases,
                      .finish = FinishGptOss});
  families.push_back({.type = "deepseek_v2",
                      .shape = {.context = 2048},
                      .has_experts = true,
                      .has_expert_width = true,
                      .knows = "attention_bias n_shared_experts",
                      .finish = FinishDeepSeek2});
  families.push_back({.type = "deepseek_v3",
                      .shape = {.context = 4096},
                      .has_experts = true,
                      .has_expert_width = true,
                      .knows = "attention_bias n_shared_experts",
                      .finish = FinishDeepSeek3});
}

// Llama's relatives.
void AddGated(std::vector<Family>& families) {
  constexpr std::string_view biases = "attention_bias";
  families.push_back({.type = "llama",
                      .shape = {.context = 2048},
                      .knows = "attention_bias mlp_bias",
                      .finish = FinishLlama});
  families.push_back({.type = "mistral",
                      .shape = {.key_value_heads = 8, .context = 131072, .whole_every = kNever},
                      .finish = ReadWindow});
  families.push_back(
      {.type = "qwen2", .shape = {.key_value_heads = 32, .context = 32768, .query_biases = true}});
  families.push_back(
      {.type = "qwen3",
       .shape = {.key_value_heads = 32, .head_width = 128, .context = 32768, .query_norms = true},
       .knows = biases,
       .finish = FinishAllBiases});
  families.push_back({.type = "gemma",
                      .shape = {.key_value_heads = 16,
                                .head_width = 256,
                                .context = 8192,
                                .tied_head = true,
                                .float_norms = true},
                      .knows = biases,
                      .finish = FinishAllBiases});
  families.push_back({.type = "gemma2",
                      .shape = {.key_value_heads = 4,
                                .head_width = 256,
                                .context = 8192,
                                .tied_head = true,
                                .float_norms = true,
                                .block_norms = 4,
                                .window = 4096,
                                .whole_every = 2},
                      .finish = ReadWindow});
  families.push_back({.type = "gemma3_text",
                      .shape = {.heads = 8,
                                .key_value_heads = 4,
                                .head_width = 256,
                                .vocabulary = 262208,
                                .context = 131072,
                                .tied_head = true,
                                .query_norms = true,
                                .float_norms = true,
                                .block_norms = 4,
                                .window = 4096,
                                .whole_every = 6},
                      .finish = ReadWindow});
  families.push_back({.type = "qwen2_vl",
                      .shape = {.key_value_heads = 32, .context = 32768, .query_biases = true}});
}

// More of them.
void AddMoreGated(std::vector<Family>& families) {
  constexpr std::string_view biases = "attention_bias";
  families.push_back({.type = "qwen2_vl_text",
                      .shape = {.key_value_heads = 32, .context = 32768, .query_biases = true}});
  families.push_back({.type = "qwen2_5_vl",
                      .shape = {.key_value_heads = 32, .context = 128000, .query_biases = true}});
  families.push_back({.type = "qwen2_5_vl_text",
                      .shape = {.key_value_heads = 32, .context = 128000, .query_biases = true}});
  families.push_back({.type = "phi3",
                      .shape = {.context = 4096,
                                .joined_queries = true,
                                .joined_gates = true,
                                .whole_every = kNever},
                      .finish = ReadWindow});
  families.push_back({.type = "cohere",
                      .shape = {.context = 8192, .tied_head = true, .block_norms = 1},
                      .knows = biases,
                      .finish = FinishCohere});
  families.push_back({.type = "olmo2",
                      .shape = {.context = 2048, .whole_query_norms = true},
                      .knows = biases,
                      .finish = FinishAllBiases});
  families.push_back({.type = "granite",
                      .shape = {.context = 2048},
                      .knows = "attention_bias mlp_bias",
                      .finish = FinishLlama});
  families.push_back({.type = "smollm3",
                      .shape = {.key_value_heads = 4, .context = 32768, .tied_head = true},
                      .knows = "attention_bias mlp_bias",
                      .finish = FinishLlama});
  families.push_back({.type = "glm4",
                      .shape = {.key_value_heads = 2,
                                .head_width = 128,
                                .context = 131072,
                                .block_norms = 4,
                                .joined_gates = true},
                      .knows = biases,
                      .finish = FinishQueryBiases});
}

const std::vector<Family>& Families() {
  static const auto* const all = [] {
    auto* const families = new std::vector<Family>;
    AddGated(*families);
    AddMoreGated(*families);
    AddExperts(*families);
    AddWithLayerNorm(*families);
    return families;
  }();
  return *all;
}

// The names of one size, in the order of preference. GPT-2's own name is the second, if there is one.
enum class Need { kNo, kByAll, kByDense, kByExperts, kByExpertWidth };
struct SizeKeys {
  int64_t ModelShape::*to;
  std::array<const char*, 3> names;
  Need needed = Need::kNo;
};
constexpr SizeKeys kSizeKeys[] = {
    {&ModelShape::layers, {"num_hidden_layers", "n_layer"}, Need::kByAll},
    {&ModelShape::width, {"hidden_size", "n_embd"}, Need::kByAll},
    {&ModelShape::heads, {"num_attention_heads", "n_head"}, Need::kByAll},
    {&ModelShape::key_value_heads, {"num_key_value_heads", "num_kv_heads"}},
    {&ModelShape::head_width, {"head_dim"}},
    {&ModelShape::feed_forward,
     {"intermediate_size", "n_inner", "ffn_hidden_size"},
     Need::kByDense},
    {&ModelShape::feed_forward, {"moe_intermediate_size"}, Need::kByExpertWidth},
    {&ModelShape::vocabulary, {"vocab_size"}, Need::kByAll},
    {&ModelShape::context, {"max_position_embeddings", "n_positions"}},
    {&ModelShape::experts,
     {"num_local_experts", "num_experts", "n_routed_experts"},
     Need::kByExperts},
    {&ModelShape::experts_of_token, {"num_experts_per_tok"}, Need::kByExperts}};

// A key that adds parameters which the family does not have.
struct Foreign {
  const char* key;
  bool of_experts = false;  // a family of experts has it
};
constexpr Foreign kForeign[] = {{"attention_bias"},         {"mlp_bias"},
                                {"add_cross_attention"},    {"mlp_only_layers"},
                                {"n_shared_experts"},       {"shared_expert_intermediate_size"},
                                {"n_routed_experts", true}, {"num_local_experts", true},
                                {"num_experts", true},      {"moe_intermediate_size", true}};

// False: the key is absent, or its value is null, false, 0 or empty.
bool IsOn(const Json& root, const char* key) {
  if (!root.contains(key)) return false;
  const Json& value = root[key];
  return value.is_structured() ? !value.empty() : !value.is_null() && value != false && value != 0;
}

// Describes a model if its file is refused. The headers of safetensors files do not say how
// many experts a token uses.
const char* Instead(const Json& root) {
  const bool has_experts =
      std::any_of(std::begin(kForeign), std::end(kForeign), [&](const Foreign& foreign) {
        const std::string_view key = foreign.key;
        return key.find("expert") != key.npos && IsOn(root, foreign.key);
      });
  return has_experts ? "sizes close to the model's as flags (--layers, --experts ...)"
                     : "the model's files to --safetensors (ebb.write_shapes writes one without "
                       "values), or "
                       "its sizes as flags";
}

absl::StatusOr<Family> FamilyOf(const Json& root) {
  const std::string type = root.contains("model_type") && root["model_type"].is_string()
                               ? root["model_type"].get<std::string>()
                               : "";
  std::string types;
  for (const Family& family : Families()) {
    if (type == family.type) return family;
    absl::StrAppend(&types, types.empty() ? "" : ", ", family.type);
  }
  return absl::UnimplementedError(absl::StrCat("\"model_type\" is ",
                                               type.empty() ? "missing" : config::Quoted(type),
                                               "; known types: ", types, ". Give ", Instead(root)));
}

absl::Status CheckForeign(const Json& root, const Family& family) {
  const auto refused = [&](const char* key) {
    return absl::UnimplementedError(absl::StrCat("\"", key, "\" is ", config::Shown(root[key]),
                                                 ", which is not supported for ", family.type,
                                                 ": give ", Instead(root)));
  };
  for (const Foreign& foreign : kForeign) {
    const bool is_known =
        (foreign.of_experts && family.has_experts) ||
        absl::StrContains(absl::string_view(family.knows.data(), family.knows.size()), foreign.key);
    if (IsOn(root, foreign.key) && !is_known) return refused(foreign.key);
  }
  if (IsOn(root, "decoder_sparse_step") && root["decoder_sparse_step"] != 1)
    return refused("decoder_sparse_step");
  return absl::OkStatus();
}

bool IsNeeded(Need needed, const Family& family) {
  const bool is_dense = !family.derives_feed_forward && !family.has_expert_width;
  return needed == Need::kByAll || (needed == Need::kByDense && is_dense) ||
         (needed == Need::kByExperts && family.has_experts) ||
         (needed == Need::kByExpertWidth && family.has_expert_width);
}

absl::Status Read(const Json& root, const Family& family, const SizeKeys& size, ModelShape& shape) {
  if (size.needed == Need::kByExpertWidth && !family.has_expert_width) return absl::OkStatus();
  for (const char* name : size.names) {
    if (name == nullptr || !root.contains(name)) continue;
    if (root[name].is_null()) {  // derived from the other sizes, in every family
      shape.*size.to = 0;
      continue;
    }
    const auto number = config::ToInteger(root[name]);
    if (!number || *number < 0)
      return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is ",
                                                     config::Shown(root[name]),
                                                     ": it must be a whole number, 0 or above"));
    shape.*size.to = *number;
    return absl::OkStatus();
  }
  const bool has_default = size.needed == Need::kByAll && shape.*size.to > 0;
  if (!IsNeeded(size.needed, family) || has_default) return absl::OkStatus();
  const bool has_own_name = family.shape.learned_positions && size.names[1] != nullptr;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", size.names[has_own_name ? 1 : 0], "\" is missing"));
}

// Whether the model that the file is of is no language model, but, for example, a classifier.
bool HasOtherHead(const Json& root) {
  const auto named = root.find("architectures");
  if (named == root.end() || !named->is_array() || named->empty() || !(*named)[0].is_string())
    return false;
  const auto name = (*named)[0].get<std::string>();
  return name.find("LMHead") == name.npos && name.find("ForCausalLM") == name.npos &&
         name.find("ForConditionalGeneration") == name.npos;
}

}  // namespace

absl::StatusOr<ModelShape> ShapeOfConfigJson(std::string_view text, std::string name) {
  EBB_ASSIGN_OR_RETURN(const config::Document document, config::ParseDocument(text));
  EBB_RETURN_IF_ERROR(document.problems.status());
  const Json* root = &document.root;
  if (root->contains("text_config") && (*root)["text_config"].is_object()) {
    root = &(*root)["text_config"];
    name += ", only its text_config";
  } else if (root->contains("vision_config")) {
    name += ", only its text";
  }
  if (HasOtherHead(document.root)) name += ", with a language model's head";
  EBB_ASSIGN_OR_RETURN(const Family family, FamilyOf(*root));
  EBB_RETURN_IF_ERROR(CheckForeign(*root, family));
  ModelShape shape = family.shape;
  shape.name = std::move(name);
  constexpr char kTied[] = "tie_word_embeddings";
  // A multimodal model ties them if its own value or its text's says so.
  shape.tied_head = Flag(*root, kTied, family.shape.tied_head) || Flag(document.root, kTied, false);
  for (const SizeKeys& size : kSizeKeys) EBB_RETURN_IF_ERROR(Read(*root, family, size, shape));
  if (!family.has_experts) shape.experts = 1;
  // One expert has a router, too; a block with none is as wide as another key says.
  if (family.has_experts && shape.experts < 2)
    return absl::UnimplementedError(absl::StrCat("experts of a block: ", shape.experts,
                                                 ", which is not supported for ", family.type,
                                                 ": give ", Instead(*root)));
  if (family.finish != nullptr) EBB_RETURN_IF_ERROR(family.finish(*root, shape));
  return Complete(shape);
}

}  // namespace ebb::planner
