#include "ebb/runtime/planner/hugging_face_config.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/document.h"

namespace ebb::planner {
namespace {

using config::Json;

// A model_type with parameters that are counted exactly. A missing key has the default of Hugging
// Face's class.
struct Family {
  const char* type;
  bool gated = true, tied_head = false, query_biases = false, query_norms = false;
  bool has_experts = false;
  bool has_expert_width = false;  // a key of its own for the width inside an expert
  int64_t key_value_heads = 0;    // 0: as many as heads
  int64_t head_width = 0;         // 0: the width over the heads
  int64_t context = 32768;
};
constexpr Family kFamilies[] = {
    {.type = "gpt2", .gated = false, .tied_head = true, .context = 1024},
    {.type = "llama", .context = 2048},
    {.type = "mistral", .key_value_heads = 8, .context = 131072},
    {.type = "mixtral", .has_experts = true, .key_value_heads = 8, .context = 131072},
    {.type = "qwen2", .query_biases = true, .key_value_heads = 32},
    {.type = "qwen3", .query_norms = true, .key_value_heads = 32, .head_width = 128},
    {.type = "qwen3_moe",
     .query_norms = true,
     .has_experts = true,
     .has_expert_width = true,
     .key_value_heads = 4},
    {.type = "gemma",
     .tied_head = true,
     .key_value_heads = 16,
     .head_width = 256,
     .context = 8192}};

// The names of one size, in the order of preference. GPT-2's own name is the second, if there is one.
enum class Need { kNo, kByAll, kByGated, kByExperts, kByExpertWidth };
struct SizeKeys {
  int64_t ModelShape::*to;
  std::array<const char*, 2> names;
  Need needed = Need::kNo;
};
constexpr SizeKeys kSizeKeys[] = {
    {&ModelShape::layers, {"num_hidden_layers", "n_layer"}, Need::kByAll},
    {&ModelShape::width, {"hidden_size", "n_embd"}, Need::kByAll},
    {&ModelShape::heads, {"num_attention_heads", "n_head"}, Need::kByAll},
    {&ModelShape::key_value_heads, {"num_key_value_heads"}},
    {&ModelShape::head_width, {"head_dim"}},
    {&ModelShape::feed_forward, {"intermediate_size", "n_inner"}, Need::kByGated},
    {&ModelShape::feed_forward, {"moe_intermediate_size"}, Need::kByExpertWidth},
    {&ModelShape::vocabulary, {"vocab_size"}, Need::kByAll},
    {&ModelShape::context, {"max_position_embeddings", "n_positions"}},
    {&ModelShape::experts, {"num_local_experts", "num_experts"}, Need::kByExperts},
    {&ModelShape::experts_of_token, {"num_experts_per_tok"}, Need::kByExperts}};

// A key that adds parameters which the family does not have.
struct Foreign {
  const char* key;
  bool of_experts = false;  // a family of experts has it
};
constexpr Foreign kForeign[] = {{"attention_bias"},      {"mlp_bias"},
                                {"add_cross_attention"}, {"mlp_only_layers"},
                                {"n_shared_experts"},    {"shared_expert_intermediate_size"},
                                {"n_routed_experts"},    {"num_local_experts", true},
                                {"num_experts", true},   {"moe_intermediate_size", true}};

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
                     : "the model's files to --safetensors, or its sizes as flags";
}

absl::StatusOr<Family> FamilyOf(const Json& root) {
  const std::string type = root.contains("model_type") && root["model_type"].is_string()
                               ? root["model_type"].get<std::string>()
                               : "";
  std::string types;
  for (const Family& family : kFamilies) {
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
    if (IsOn(root, foreign.key) && !(foreign.of_experts && family.has_experts))
      return refused(foreign.key);
  }
  if (IsOn(root, "decoder_sparse_step") && root["decoder_sparse_step"] != 1)
    return refused("decoder_sparse_step");
  return absl::OkStatus();
}

bool IsNeeded(Need needed, const Family& family) {
  const bool is_dense = family.gated && !family.has_expert_width;
  return needed == Need::kByAll || (needed == Need::kByGated && is_dense) ||
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
  if (!IsNeeded(size.needed, family)) return absl::OkStatus();
  const bool has_own_name = !family.gated && size.names[1] != nullptr;
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

constexpr char kTied[] = "tie_word_embeddings";
bool Flag(const Json& root, const char* name, bool otherwise) {
  return root.contains(name) && root[name].is_boolean() ? root[name].get<bool>() : otherwise;
}

}  // namespace

absl::StatusOr<ModelShape> ShapeOfConfigJson(std::string_view text, std::string name) {
  EBB_ASSIGN_OR_RETURN(const config::Document document, config::ParseDocument(text));
  EBB_RETURN_IF_ERROR(document.problems.status());
  const Json* root = &document.root;
  if (root->contains("text_config") && (*root)["text_config"].is_object()) {
    root = &(*root)["text_config"];
    name += ", only its text_config";
  }
  if (HasOtherHead(document.root)) name += ", with a language model's head";
  EBB_ASSIGN_OR_RETURN(const Family family, FamilyOf(*root));
  EBB_RETURN_IF_ERROR(CheckForeign(*root, family));
  ModelShape shape{
      .name = std::move(name),
      .key_value_heads = family.key_value_heads,
      .head_width = family.head_width,
      .context = family.context,
      .gated = family.gated,
      // A multimodal model ties them if its own value or its text's says so.
      .tied_head = Flag(*root, kTied, family.tied_head) || Flag(document.root, kTied, false),
      .query_biases = family.query_biases,
      .query_norms = family.query_norms};
  for (const SizeKeys& size : kSizeKeys) EBB_RETURN_IF_ERROR(Read(*root, family, size, shape));
  if (!family.has_experts) shape.experts = 1;
  // One expert has a router, too; a block with none is as wide as another key says.
  if (family.has_experts && shape.experts < 2)
    return absl::UnimplementedError(absl::StrCat("experts of a block: ", shape.experts,
                                                 ", which is not supported for ", family.type,
                                                 ": give ", Instead(*root)));
  return Complete(shape);
}

}  // namespace ebb::planner
