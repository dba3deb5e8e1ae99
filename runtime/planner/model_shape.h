// Transformers by their sizes, or by a known name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// Two families. GPT-2: learned positions, norms and products with biases, two matrices of
// feed-forward, the table of the embedding as head. Gated (Llama, Mistral, Qwen, Mixtral): three
// matrices of feed-forward, no biases.
struct ModelShape {
  std::string name = "";
  int64_t layers = 0, width = 0, heads = 0, key_value_heads = 0, head_width = 0, feed_forward = 0;
  int64_t vocabulary = 0, context = 0;  // context: the longest
  int64_t experts = 1, experts_of_token = 1;
  bool gated = true;
  bool tied_head = false;
  bool query_biases = false;  // of queries, keys and values (Qwen 2)
  bool query_norms = false;   // of each head's queries and keys (Qwen 3)

  int64_t queries() const { return heads * head_width; }
  int64_t keys() const { return key_value_heads * head_width; }
};

// The sizes of a shape. The product of any two is at most 2^53.
struct ModelSize {
  const char* name;  // also of its flag
  int64_t ModelShape::*of;
  int64_t most;
  const char* what = nullptr;  // null: no flag sets it
};
std::span<const ModelSize> ModelSizes();

std::span<const ModelShape> NamedShapes();
// kNotFound names the nearest model.
absl::StatusOr<ModelShape> ShapeOfName(std::string_view name);

// Derives key_value_heads, head_width and feed_forward from the other sizes if they are 0. Errors
// name the size.
absl::StatusOr<ModelShape> Complete(ModelShape shape);

// `shape` is complete.
Model ModelOf(const ModelShape& shape);

}  // namespace ebb::planner
