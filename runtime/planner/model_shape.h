// Transformers by their sizes: those that are known by name, or any.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// Two families: GPT-2 (learned positions, norms and products with biases, two matrices of feed-forward, the head is
// the embedding's table) and gated ones as Llama, Mistral, Qwen and Mixtral are (three matrices, no biases).
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

std::span<const ModelShape> NamedShapes();
// kNotFound names the nearest.
absl::StatusOr<ModelShape> ShapeOfName(std::string_view name);

// Fills in what is 0 and follows from the rest: key_value_heads, head_width, feed_forward. Errors name the size.
absl::StatusOr<ModelShape> Complete(ModelShape shape);

// Of a complete shape.
Model ModelOf(const ModelShape& shape);

}  // namespace ebb::planner
