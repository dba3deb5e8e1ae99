// The GPT as Ebb's model: units, parameters and the order of visits. It has GPT-2's shape (Radford
// et al. 2019): learned positions, norms before attention and feed-forward, tanh GELU, the
// embedding's table used again as the head.
//
//   embedding -> block 0 -> ... -> block n - 1 -> embedding (final norm, head, loss)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/sharding/model.h"

namespace ebb::gpt {

struct GptShape {
  int64_t layers = 6, heads = 6, width = 384, context = 256, vocabulary = 256;
};

// The error names the wrong field.
absl::Status Validate(const GptShape& shape);

struct WeightAndBias {
  ParameterId weight{}, bias{};
};

struct BlockIds {
  UnitId unit{};
  WeightAndBias norm1, qkv, projection, norm2, up, down;
};

struct Gpt {
  GptShape shape;
  UnitId embedding{};  // visited first, and last as the head
  ParameterId tokens{}, positions{};
  WeightAndBias norm;
  std::vector<BlockIds> blocks;
};

struct GptOptions {
  GptShape shape;
  uint64_t seed = 1;              // of the initial values
  int64_t boundary_bytes = 0;     // a micro-batch's activations between two visits
  std::string vector_group = "";  // parameter group of norms and biases
};

// Adds the model to `spec`.
Gpt Declare(const GptOptions& options, ModelSpec& spec);

}  // namespace ebb::gpt
