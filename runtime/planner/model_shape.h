// Transformers by their sizes, or by a known name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// A transformer: its sizes, and what its blocks have beside them. Without a change it is Llama's:
// three matrices of feed-forward, two norms, no biases.
struct ModelShape {
  std::string name = "";
  int64_t layers = 0, width = 0, heads = 0, key_value_heads = 0, head_width = 0, feed_forward = 0;
  int64_t vocabulary = 0, context = 0;  // context: the longest
  int64_t experts = 1, experts_of_token = 1;
  bool gated = true;  // false: two matrices of feed-forward
  bool tied_head = false;
  bool query_biases = false;  // of queries, keys and values (Qwen 2)
  bool query_norms = false;   // of each head's queries and keys (Qwen 3)

  bool learned_positions = false;  // a table with a row for each position (GPT-2)
  bool norm_biases = false;
  bool float_norms = false;      // norms multiply in fp32 (Gemma)
  bool projection_bias = false;  // of attention's output
  bool feed_forward_biases = false;
  bool head_bias = false;
  bool whole_query_norms = false;  // one of all heads' queries and one of their keys (OLMo 2)
  bool sinks = false;              // a number for each head (gpt-oss)
  int64_t block_norms = 2;         // 1: attention and feed-forward run side by side; 4: Gemma 2
  // Matrices that are one in files: queries, keys and values; gate and up.
  bool joined_queries = false, joined_gates = false;

  // Experts (DeepSeek): the first layers have none, but a feed-forward layer of this width. All
  // tokens go through shared experts, which together are so wide, and may have a gate.
  int64_t dense_layers = 0, dense_feed_forward = 0, shared_feed_forward = 0;
  bool shared_gate = false, router_bias = false;

  // Latent attention (DeepSeek): queries, and keys with values, go through a narrow vector. 0: they
  // do not. A head's keys have a part of rotary_width that all heads share.
  int64_t query_rank = 0, key_value_rank = 0, rotary_width = 0, value_width = 0;

  // Positions that attention of most layers sees (0: all), and every how many layers one sees all.
  int64_t window = 0, whole_every = 1;

  int64_t queries() const { return heads * head_width; }
  int64_t keys() const { return key_value_heads * head_width; }

  // GPT-2's blocks: learned positions, biases everywhere, two matrices of feed-forward.
  static ModelShape Gpt2(ModelShape sizes);
};

// The sizes of a shape. The product of any two is at most 2^53.
struct ModelSize {
  const char* name;  // also of its flag
  int64_t ModelShape::*of;
  int64_t most;
  const char* what = nullptr;  // null: no flag sets it
  bool is_of_every = true;     // false: 0, most models do not have it
};
std::span<const ModelSize> ModelSizes();

std::span<const ModelShape> NamedShapes();
// kNotFound names the nearest model.
absl::StatusOr<ModelShape> ShapeOfName(std::string_view name);

// Derives key_value_heads, head_width and feed_forward from the other sizes if they are 0. Errors
// name the size.
absl::StatusOr<ModelShape> Complete(ModelShape shape);

// kInvalidArgument: more tensor ranks than there are heads of keys and values.
absl::Status CheckTensorRanks(const ModelShape& shape, int tensor_ranks);

// `shape` is complete. Its visits are those of one of so many tensor ranks, which share matrices as
// Megatron-LM does (Shoeybi et al., arXiv 1909.08053): queries, keys, values and attention's output
// by heads, feed-forward by its inner width, of each expert too, table and head by words. Norms,
// positions, routers and latent vectors are whole.
Model ModelOf(const ModelShape& shape, int tensor_ranks = 1);

}  // namespace ebb::planner
