#include "ebb/runtime/planner/hugging_face_config.h"

#include <array>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/document.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::planner {
namespace {

using config::Json;

// The names that one size has, in the order of preference; GPT-2's come last.
struct Size {
  int64_t ModelShape::*to;
  std::array<const char*, 4> names;
  bool required = false;
};
constexpr Size kSizes[] = {
    {&ModelShape::layers, {"num_hidden_layers", "n_layer", "num_layers"}, true},
    {&ModelShape::width, {"hidden_size", "n_embd", "d_model"}, true},
    {&ModelShape::heads, {"num_attention_heads", "n_head"}, true},
    {&ModelShape::key_value_heads, {"num_key_value_heads"}},
    {&ModelShape::head_width, {"head_dim"}},
    {&ModelShape::feed_forward, {"moe_intermediate_size", "intermediate_size", "n_inner"}},
    {&ModelShape::vocabulary, {"vocab_size"}, true},
    {&ModelShape::context, {"max_position_embeddings", "n_positions", "n_ctx"}},
    {&ModelShape::experts, {"num_local_experts", "num_experts", "n_routed_experts"}},
    {&ModelShape::experts_of_token, {"num_experts_per_tok"}}};

absl::Status Read(const Json& root, const Size& size, ModelShape& shape) {
  for (const char* name : size.names) {
    if (name == nullptr || !root.contains(name) || root[name].is_null()) continue;
    const auto number = config::ToInteger(root[name]);
    if (!number || *number < 0)
      return absl::InvalidArgumentError(
          absl::StrCat("\"", name, "\" is no whole number: ", config::Shown(root[name])));
    shape.*size.to = *number;
    return absl::OkStatus();
  }
  if (!size.required) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("\"", size.names[0], "\" is missing"));
}

bool Flag(const Json& root, const char* name, bool otherwise) {
  return root.contains(name) && root[name].is_boolean() ? root[name].get<bool>() : otherwise;
}

}  // namespace

absl::StatusOr<ModelShape> ShapeOfConfigJson(std::string_view text, std::string name) {
  EBB_ASSIGN_OR_RETURN(const config::Document document, config::ParseDocument(text));
  EBB_RETURN_IF_ERROR(document.problems.status());
  const Json* root = &document.root;
  if (root->contains("text_config") && (*root)["text_config"].is_object())
    root = &(*root)["text_config"];
  const std::string type = root->contains("model_type") && (*root)["model_type"].is_string()
                               ? (*root)["model_type"].get<std::string>()
                               : "";
  ModelShape shape{.name = std::move(name), .context = 4096};
  shape.gated = !type.starts_with("gpt");
  shape.tied_head = Flag(*root, "tie_word_embeddings", !shape.gated);
  shape.query_biases = Flag(*root, "attention_bias", type == "qwen2" || type == "qwen2_moe");
  shape.query_norms = type.starts_with("qwen3");
  for (const Size& size : kSizes) EBB_RETURN_IF_ERROR(Read(*root, size, shape));
  if (shape.experts == 0) shape.experts = 1;
  return Complete(shape);
}

}  // namespace ebb::planner
