// A model as the planner knows it: the tensors of each unit, what a token costs in each visit of one, and what a
// visit's forward keeps for its backward. It comes from a shape (model_shape.h) or from the headers of safetensors
// files (model_of_tensors.h).
//
//   embedding -> block 0 -> ... -> block n - 1 -> head       the head may be the embedding's table, visited again
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/report/machine_costs.h"

namespace ebb::planner {

inline constexpr int64_t kUnitsMax = 2000;  // of a model: planning all choices takes seconds then

// The table of learned positions, of a model from a shape.
inline constexpr char kPositions[] = "embedding.positions";

struct ModelTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::optional<DType> stored = {};  // in a file. kInt8: bytes that nothing trains
};
struct ModelUnit {
  std::string name;
  std::vector<ModelTensor> tensors = {};
};

// Of one token.
struct ModelVisit {
  int unit = 0;
  bool is_block = false;  // what recomputing computes again
  // Multiplications with parameters in forward; and those of attention for each position of the context.
  double products = 0, products_a_position = 0;
  // What forward keeps: elements of the compute dtype, and bytes of other numbers. Where attention is not fused, also
  // so many elements for each position of the context.
  int64_t kept = 0, kept_bytes = 0, kept_a_position = 0;
  // Elements in use while it computes, in memory that all visits share.
  int64_t scratch = 0, scratch_a_position = 0;
};

struct Model {
  std::string name = "";
  int64_t width = 0, vocabulary = 0,
          context = 0;  // context: the longest that it is made for; 0: not known
  std::vector<ModelUnit> units = {};
  std::vector<ModelVisit> visits = {};
  std::map<std::string, int64_t> stored_bytes = {};  // in files, by the format's name of the dtype

  // A table of learned positions gets a row for each token of a longer context.
  void GrowPositions(int64_t tokens);

  int64_t parameters() const;
  int64_t largest_unit() const;  // elements
};

// How a rank goes over it.
struct Pass {
  int64_t sequences = 1, context = 1;  // of a micro-batch
  int64_t micro_batches = 1;           // of a step
  int64_t micro_batches_per_round = 1;
  bool recompute = false;       // a block's forward is computed again in its backward
  bool fused_attention = true;  // scores are never in memory
  bool whole_logits = false;    // else in chunks that fit in a block's scratch
  int64_t own_activations =
      -1;  // bytes that a trainer declares instead of what is modelled; -1: none
  DType compute = DType::kBFloat16;

  int64_t tokens() const { return sequences * context; }
};

// As an engine gets it: boundaries between visits are the engine's, all else that activations need is the workspace.
// Where the compute dtype is among the stored ones, tensors keep theirs, as routers in fp32 beside bf16; boundaries are
// in the workspace then, because the engine's have one dtype. Errors: of the model, and sizes beyond 2^53.
absl::StatusOr<ModelSpec> SpecOf(const Model& model, const Pass& pass);

// Floating-point operations of one micro-batch on a rank, without those that recomputing adds: backward has twice
// those of forward.
double FlopsOf(const Model& model, const Pass& pass);

// The model's visit for each of a spec that DivideByDType has divided. Null: a visit to a part, which has no work of
// its own.
std::vector<const ModelVisit*> VisitsOf(const Model& model, const ModelSpec& divided);

// By such a visit, of a round, on a rank that computes so many operations a second. `launch`: the caller's seconds for
// one kernel.
std::vector<sharding::KernelWork> WorkOf(std::span<const ModelVisit* const> visits,
                                         const Pass& pass, double flops, double launch);

}  // namespace ebb::planner
