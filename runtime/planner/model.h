// A model as the planner sees it: the tensors of each unit, the operations of each visit for a
// token, and the tensors that a visit's forward keeps for its backward. It comes from a shape
// (model_shape.h) or from the headers of safetensors files (model_of_tensors.h).
//
//   embedding -> block 0 -> ... -> block n - 1 -> head
//
// The head may visit the embedding's table again.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/report/machine_costs.h"

namespace ebb::planner {

inline constexpr int64_t kUnitsMax = 2000;  // planning all choices of such a model takes seconds

// The name of the table of learned positions in a model from a shape.
inline constexpr char kPositions[] = "embedding.positions";

struct ModelTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::optional<DType> stored = {};  // the dtype in a file; kInt8: frozen bytes
  bool trainable = true;             // kInt8: no bytes are
  // The module that a matrix of a block is the weight of, as Hugging Face calls it
  // (adapters.h). In files it may be one matrix with the tensor before it.
  std::string module = "";
  bool joins_previous = false;
  int64_t parameters = 0;  // that bytes stand for; 0: as many as elements
  int64_t rows = 0;        // of the matrix that bytes stand for: its outputs; 0: not known
  // How tensor ranks share it (ParameterSpec); without a split each has all of it.
  std::optional<Split> split = {};
  bool sums_gradient = false;
};
struct ModelUnit {
  std::string name;
  std::vector<ModelTensor> tensors = {};
};

// Figures of one token.
struct ModelVisit {
  int unit = 0;
  bool is_block = false;  // recomputing computes it again
  // Multiplications in forward: with parameters; and, for each position of the context, in
  // attention.
  double products = 0, products_a_position = 0;
  double frozen_products = 0;  // of `products`: with frozen parameters, which get no gradient
  int64_t window = 0;          // positions that attention sees; 0: all
  // Elements that bytes of a quantised base become before a product: of the visit, and of its
  // largest matrix.
  int64_t dequantized = 0, dequantized_most = 0;
  // Forward keeps `kept` elements of the compute dtype and `kept_bytes` of other numbers. If
  // attention is not fused, it also keeps `kept_a_position` elements for each position of the
  // context.
  int64_t kept = 0, kept_bytes = 0, kept_a_position = 0;
  // Eager torch keeps (activations.h): elements, other bytes, and elements of gradients while
  // its backward computes. 0: not known.
  int64_t torch_kept = 0, torch_kept_bytes = 0, torch_gradients = 0;
  // Likewise torch.compile.
  int64_t compiled_kept = 0, compiled_kept_bytes = 0, compiled_gradients = 0;
  // Elements in use while it computes, in memory that all visits share.
  int64_t scratch = 0, scratch_a_position = 0;
  // Figures of one of several tensor ranks. `kept_whole` of the kept elements are equal on all of them. Of
  // inputs of matrices that are cut by rows, backward sums the gradients; of those cut by columns,
  // forward sums the outputs. Both are elements. Of the loss, forward sums numbers of fp32.
  int64_t kept_whole = 0, tensor_inputs = 0, tensor_outputs = 0, tensor_numbers = 0;
};

struct Model {
  std::string name = "";
  int64_t width = 0, vocabulary = 0,
          context = 0;  // context: the longest that the model allows; 0: not known
  int64_t experts = 1, experts_of_token = 1;
  std::string trains = "";  // what trains, if not all: "LoRA of rank 16 on all-linear"
  int tensor_ranks = 1;     // the visits are those of one of so many
  std::vector<ModelUnit> units = {};
  std::vector<ModelVisit> visits = {};
  std::map<std::string, int64_t> stored_bytes = {};  // in files, by the format's name of the dtype

  // Gives the table of learned positions a row for each token of a longer context.
  void GrowPositions(int64_t tokens);

  int64_t parameters() const;
  int64_t trained_parameters() const;
  bool trains_whole() const { return trained_parameters() == parameters(); }
  int64_t largest_unit() const;  // elements, on a tensor rank
  // Elements of the largest matrix. Here all experts of a block are one tensor, of three dimensions;
  // a module has the matrix of one expert.
  int64_t largest_module() const;
};

// How a rank trains the model.
struct Pass {
  int64_t sequences = 1, context = 1;  // of a micro-batch
  int64_t micro_batches = 1;           // of a step
  int64_t micro_batches_per_round = 1;
  bool recompute = false;       // backward computes a block's forward again
  bool fused_attention = true;  // scores are never in memory
  bool torch = false;           // the trainer is torch, not one like examples/gpt
  bool compiled = false;        // and torch.compile's, not eager
  bool whole_logits = false;    // else in chunks that fit in a block's scratch
  // Tensor ranks share the rows of norms and of what lies between blocks (Korthikanti et al., arXiv
  // 2205.05198).
  bool sequence_parallel = false;
  int64_t own_activations =
      -1;  // bytes that a trainer declares instead of the model of activations.h; -1: none
  DType compute = DType::kBFloat16;

  int64_t tokens() const { return sequences * context; }
};

// The model for an engine. The engine owns the boundaries between visits; the workspace has all
// other activations. If a tensor is stored in the compute dtype, all tensors keep their stored
// dtypes, such as fp32 routers beside bf16. The workspace then has the boundaries too, because the
// engine's have one dtype. Errors: the model's, sizes beyond 2^53.
absl::StatusOr<ModelSpec> SpecOf(const Model& model, const Pass& pass);

// Floating-point operations of one micro-batch, without those of recomputing. Backward has twice
// those of forward, and once those of products with frozen parameters. It ends at the first visit
// with something to train.
double FlopsOf(const Model& model, const Pass& pass);

// The model's visit for each visit of a spec that DivideByDType has divided. Null: a visit to a
// part, which has no kernels.
std::vector<const ModelVisit*> VisitsOf(const Model& model, const ModelSpec& divided);

// Rates of a rank: operations and bytes of device memory a second; `launch`: the host's seconds for one
// kernel.
struct KernelRates {
  double flops = 0, bytes = 0, launch = 0;
};
// The work of each such visit of `model` in a round.
std::vector<sharding::KernelWork> WorkOf(const Model& model,
                                         std::span<const ModelVisit* const> visits,
                                         const Pass& pass, const KernelRates& rates);

}  // namespace ebb::planner
