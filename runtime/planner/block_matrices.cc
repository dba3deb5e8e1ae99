#include "ebb/runtime/planner/block_matrices.h"

namespace ebb::planner {
namespace {

constexpr Over kRows = Over::kRows, kColumns = Over::kColumns;

// `hidden`: the width inside; `experts` 0: all tokens go through it.
void AddFeedForward(const ModelShape& s, const char* const names[3], int64_t hidden,
                    int64_t experts, std::vector<Matrix>& matrices) {
  const bool joined = s.joined_gates;
  Matrix matrix{.rows = hidden,
                .columns = s.width,
                .experts = experts,
                .has_bias = s.feed_forward_biases,
                .over = kRows};
  if (s.gated) {
    matrix.name = names[0];
    matrix.module = joined ? "gate_up_proj" : "gate_proj";
    matrices.push_back(matrix);
  }
  matrix.name = names[1];
  matrix.module = joined ? "gate_up_proj" : "up_proj";
  matrix.joins_previous = joined;
  matrices.push_back(matrix);
  matrices.push_back({.name = names[2],
                      .module = "down_proj",
                      .rows = s.width,
                      .columns = hidden,
                      .experts = experts,
                      .has_bias = s.feed_forward_biases,
                      .is_kept = false,
                      .over = kColumns});
}

std::vector<Matrix> LatentAttentionOf(const ModelShape& s) {
  const int64_t values = s.heads * s.value_width,
                of_head = s.head_width - s.rotary_width + s.value_width;
  std::vector<Matrix> matrices;
  if (s.query_rank > 0) {
    matrices.push_back({"queries_down", "q_a_proj", s.query_rank, s.width});
    matrices.push_back({.name = "queries_up",
                        .module = "q_b_proj",
                        .rows = s.queries(),
                        .columns = s.query_rank,
                        .over = kRows,
                        .multiple = s.head_width});
  } else {
    matrices.push_back({.name = "queries",
                        .module = "q_proj",
                        .rows = s.queries(),
                        .columns = s.width,
                        .over = kRows,
                        .multiple = s.head_width});
  }
  matrices.push_back(
      {"keys_values_down", "kv_a_proj_with_mqa", s.key_value_rank + s.rotary_width, s.width});
  matrices.push_back({.name = "keys_values_up",
                      .module = "kv_b_proj",
                      .rows = s.heads * of_head,
                      .columns = s.key_value_rank,
                      .over = kRows,
                      .multiple = of_head});
  matrices.push_back({.name = "projection",
                      .module = "o_proj",
                      .rows = s.width,
                      .columns = values,
                      .over = kColumns,
                      .multiple = s.value_width});
  return matrices;
}

}  // namespace

bool HasExperts(const ModelShape& s, int64_t layer) {
  return s.experts > 1 && layer >= s.dense_layers;
}

std::vector<Matrix> AttentionOf(const ModelShape& s) {
  if (s.key_value_rank > 0) return LatentAttentionOf(s);
  const bool joined = s.joined_queries;
  const int64_t group = s.queries() / s.key_value_heads;
  const auto inner = [&](const char* name, const char* module, int64_t rows, int64_t multiple,
                         bool joins) {
    return Matrix{.name = name,
                  .module = joined ? "qkv_proj" : module,
                  .rows = rows,
                  .columns = s.width,
                  .has_bias = s.query_biases,
                  .joins_previous = joins,
                  .over = kRows,
                  .multiple = multiple};
  };
  return {inner("queries", "q_proj", s.queries(), group, false),
          inner("keys", "k_proj", s.keys(), s.head_width, joined),
          inner("values", "v_proj", s.keys(), s.head_width, joined),
          {.name = "projection",
           .module = "o_proj",
           .rows = s.width,
           .columns = s.queries(),
           .has_bias = s.projection_bias,
           .over = kColumns,
           .multiple = group}};
}

// A router chooses by all tokens' rows, but its gradient comes from experts of which each tensor
// rank has a part.
std::vector<Matrix> FeedForwardOf(const ModelShape& s, int64_t layer) {
  static constexpr const char *kDense[] = {"gate", "up", "down"},
                              *kExperts[] = {"gates", "ups", "downs"},
                              *kShared[] = {"shared_gate", "shared_up", "shared_down"};
  std::vector<Matrix> matrices;
  if (!HasExperts(s, layer)) {
    const bool is_first = s.experts > 1 && s.dense_feed_forward > 0;
    AddFeedForward(s, kDense, is_first ? s.dense_feed_forward : s.feed_forward, 0, matrices);
    return matrices;
  }
  const auto router = [&](const char* name, int64_t rows, bool has_bias) {
    return Matrix{.name = name,
                  .module = "",
                  .rows = rows,
                  .columns = s.width,
                  .has_bias = has_bias,
                  .is_kept = false,
                  .over = Over::kTerms};
  };
  matrices.push_back(router("router", s.experts, s.router_bias));
  AddFeedForward(s, kExperts, s.feed_forward, s.experts, matrices);
  if (s.shared_feed_forward > 0) AddFeedForward(s, kShared, s.shared_feed_forward, 0, matrices);
  if (s.shared_gate) matrices.push_back(router("shared_router", 1, false));
  return matrices;
}

}  // namespace ebb::planner
