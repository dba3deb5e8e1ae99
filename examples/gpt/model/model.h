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

// How the layers are cut over tensor ranks, as in Megatron-LM (Shoeybi et al., arXiv:1909.08053).
// A rank has whole heads, some of the feed-forward's hidden columns, and some rows of the table of
// tokens. Norms, positions, and biases of row-parallel layers are whole on every rank.
struct TensorSplit {
  int ranks = 1;
  // Between these layers each rank has its own part of the rows (Korthikanti et al.,
  // arXiv:2205.05198).
  bool divides_rows = false;

  bool cuts() const { return ranks > 1; }
  int64_t row_parts() const { return divides_rows ? ranks : 1; }
};

// The error names the option that does not go with --tensor.
absl::Status Validate(const GptShape& shape, const TensorSplit& tensor);

// A rank's part of the layers. Rank 0's is the largest.
struct TensorShare {
  int64_t heads = 0, width = 0;  // attention's heads, and their columns
  int64_t hidden = 0;
  int64_t vocabulary = 0, first_token = 0;
};
TensorShare ShareOf(const GptShape& shape, int rank, int ranks);

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

// Bytes that a rank's layers receive from other tensor ranks, for one micro-batch of a step.
struct ExchangedBytes {
  int64_t embedding = 0, block = 0;  // forward
  int64_t embedding_backward = 0, block_backward = 0;
  int64_t head = 0;  // of its backward, which computes the loss, too; it has no forward
};

struct GptOptions {
  GptShape shape;
  uint64_t seed = 1;              // of the initial values
  int64_t boundary_bytes = 0;     // a micro-batch's activations between two visits
  std::string vector_group = "";  // parameter group of norms and biases
  TensorSplit tensor = {};
  ExchangedBytes exchanged = {};
};

// Adds the model to `spec`.
Gpt Declare(const GptOptions& options, ModelSpec& spec);

}  // namespace ebb::gpt
