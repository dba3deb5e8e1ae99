// The matrices of a transformer's block, and how tensor ranks share them.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/runtime/planner/model_shape.h"

namespace ebb::planner {

// How tensor ranks share a tensor: all have it and the same gradient, or it and a term of its
// gradient, or a part of its rows or of its columns.
enum class Over : uint8_t { kEqual, kTerms, kRows, kColumns };

// A matrix of a block, of each of its experts if there are any.
struct Matrix {
  const char *name = "", *module = "";  // module "": LoRA does not adapt it
  int64_t rows = 0, columns = 0, experts = 0;
  bool has_bias = false, joins_previous = false;
  bool is_kept = true;  // its output, for backward
  Over over = Over::kEqual;
  int64_t multiple = 1;  // of the rows or columns of a tensor rank: whole heads
};

bool HasExperts(const ModelShape& shape, int64_t layer);
// The matrices of queries, keys, values and attention's output: tensor ranks have whole heads, and all queries
// that share keys and values.
std::vector<Matrix> AttentionOf(const ModelShape& shape);
std::vector<Matrix> FeedForwardOf(const ModelShape& shape, int64_t layer);

}  // namespace ebb::planner
