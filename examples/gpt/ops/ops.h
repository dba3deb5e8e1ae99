// The arithmetic of the GPT on any device: a small interface, which kernels implement (ops/cpu,
// ops/cuda).
//
// Matrices are row-major and contiguous; a row is one token. Activations are stored in the compute
// dtype, arithmetic and reductions are fp32. Gradients of parameters are written to a Target; the
// engine chooses its dtype. The same calls on the same device with the same number of threads give
// the same bits.
//
// Memory is the device's. On a GPU a call enqueues on the device's compute stream and returns.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/device.h"

namespace ebb::gpt {

// Where a parameter's gradient goes: data = beta * data + gradient. beta is 0 (the contents are
// undefined) or 1.
struct Target {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  float beta = 0;
};

// c[m, n] = beta * c + a[m, k] b[k, n] + bias[n], and the work on it before it is stored. At most
// one of added, before_gelu and gelu_input is set. Each is [m, n] in the compute dtype, as c then
// is, with beta 0.
struct MatmulArrays {
  const void* a = nullptr;
  bool a_transposed = false;  // stored [k, m]
  const void* b = nullptr;
  bool b_transposed = false;   // stored [n, k], as a layer's weights are
  const void* bias = nullptr;  // in the compute dtype; null: none
  Target c = {};
  const void* added = nullptr;  // c is the product, bias and this
  void* before_gelu = nullptr;  // gets the product with bias; c gets its GELU
  // Backward of the GELU: c is the product times GELU'(gelu_input), and gelu_output gets
  // GELU(gelu_input) again.
  const void* gelu_input = nullptr;
  void* gelu_output = nullptr;
  // With a_transposed: the sums of a over k, [m]. If the product is a weight's gradient and a is
  // the output's gradient, they are the bias's gradient. None if data is null.
  Target a_sums = {};
  int64_t m = 0, n = 0, k = 0;
};

// output = input + bias[width] + residual, all [rows, width]; output may be one of the two others.
struct AddBiasArrays {
  const void *input = nullptr, *bias = nullptr, *residual = nullptr;
  void* output = nullptr;
  int64_t rows = 0, width = 0;
};

struct NormArrays {
  const void* input = nullptr;
  const void* residual = nullptr;  // null, or added to the input first; the sum goes to `sum`
  void* sum = nullptr;
  const void *weight = nullptr, *bias = nullptr;
  void* output = nullptr;
  float *mean = nullptr, *reciprocal_deviation = nullptr;  // one for each row
  int64_t rows = 0, width = 0;
};

struct NormBackwardArrays {
  const void* input = nullptr;  // of the norm: the sum, if there was a residual
  const void* weight = nullptr;
  const float *mean = nullptr, *reciprocal_deviation = nullptr;
  const void* output_gradient = nullptr;
  const void* residual_gradient = nullptr;  // null, or added to the input's gradient
  void* input_gradient = nullptr;           // may be residual_gradient
  Target weight_gradient = {}, bias_gradient = {};
  int64_t rows = 0, width = 0;
};

// qkv: [sequences * tokens, 3 * width], queries, keys, values; head h owns columns [h, h + 1) *
// width / heads of each third.
struct AttentionArrays {
  const void* qkv = nullptr;
  void* output = nullptr;        // [sequences * tokens, width]
  float* log_sum_exp = nullptr;  // [sequences, heads, tokens]: kept from the softmax for backward
  int64_t sequences = 0, tokens = 0, heads = 0, width = 0;
};

struct AttentionBackwardArrays {
  const void *qkv = nullptr, *output = nullptr, *output_gradient = nullptr;
  const float* log_sum_exp = nullptr;
  void* qkv_gradient = nullptr;
  int64_t sequences = 0, tokens = 0, heads = 0, width = 0;
};

// Numbers that ranks with some columns of each row of logits tell each other: one for each row.
struct RowTerms {
  float* top = nullptr;        // the largest logit: of the own columns, then of all
  float* own_top = nullptr;    // of the own columns
  float* sum = nullptr;        // of exp(logit - own_top), then exp(logit - top)
  float* at_target = nullptr;  // the target's logit; 0 if another rank has it
};

// Losses of rows of logits (of LogitsDtype), and their gradients: gradient = gradient_scale *
// loss_scale * (softmax - one-hot).
//
// If the vocabulary is cut over ranks, the columns are tokens [first_token, first_token +
// vocabulary), and a row takes three calls:
//
//   LogitTerms       top, own_top, sum and at_target of the own columns
//                    the ranks replace top by the largest one
//   LogitSums        sum is of exp(logit - top)
//                    the ranks replace sum and at_target by their sums
//   CrossEntropy     the losses, and the gradients of the own columns
struct CrossEntropyArrays {
  const void* logits = nullptr;
  const int32_t* targets = nullptr;
  float* losses = nullptr;  // one for each row
  // Null: losses only. In the compute dtype; may be `logits` if they have that dtype.
  void* gradient = nullptr;
  float gradient_scale = 1;
  const float* loss_scale = nullptr;  // on the device; null: 1
  int64_t rows = 0, vocabulary = 0;
  int64_t first_token = 0;
  RowTerms terms = {};  // null: the rows have all columns
};

// The table has tokens [first_token, end_token). The output of another token is 0.
struct EmbedArrays {
  const void *token_table = nullptr,
             *position_table = nullptr;  // [vocabulary, width], [context, width]
  const int32_t* ids = nullptr;          // [sequences * tokens]
  void* output = nullptr;
  int64_t sequences = 0, tokens = 0, width = 0;
  int64_t first_token = 0, end_token = std::numeric_limits<int64_t>::max();
};

// The token table has `vocabulary` tokens from first_token on. Other tokens add nothing to it.
struct EmbedBackwardArrays {
  const void* output_gradient = nullptr;
  const int32_t* ids = nullptr;
  Target token_gradient = {}, position_gradient = {};
  int64_t sequences = 0, tokens = 0, width = 0, vocabulary = 0, context = 0;
  int64_t first_token = 0;
};

// The graphs of the call sequences that were given to Replay.
struct GraphUse {
  int64_t most = 0;      // keys that can have a graph
  int64_t kept = 0;      // CUDA graphs
  int64_t launches = 0;  // launches of graphs
  std::string given_up;  // why no more graphs are captured; empty: they are captured
};

// How a new product is computed if there are several ways: see ops/cuda/product.h. Different
// ways may have different bits.
struct ProductChoice {
  // Times each way, with the operands of the call. The call's results are then not usable.
  bool measures = false;
  // If it does not measure: a letter for each product, in the order in which they come. Further
  // products take the default way.
  std::string letters;
};

class Ops {
 public:
  virtual ~Ops() = default;

  // The first error of a call: nothing is computed since.
  virtual absl::Status status() const { return absl::OkStatus(); }
  // `calls` makes, on the ops that it gets, the calls that will come on these ops, with any
  // addresses. Everything that the calls need is made now, so that no memory is missing later.
  // Nothing is computed. On a GPU nothing is made: a call that fails is an error of the step.
  virtual absl::Status Prepare(absl::FunctionRef<void(Ops&)> /*calls*/) { return absl::OkStatus(); }
  // How often a call had to make something that had not been prepared.
  virtual int64_t unprepared() const { return 0; }

  virtual void Matmul(const MatmulArrays& arrays) = 0;
  virtual void AddBias(const AddBiasArrays& arrays) = 0;
  // The sums of a matrix [rows, columns] in the compute dtype over its rows.
  virtual void ColumnSums(const void* matrix, int64_t rows, int64_t columns,
                          const Target& sums) = 0;
  virtual void Norm(const NormArrays& arrays) = 0;
  virtual void NormBackward(const NormBackwardArrays& arrays) = 0;
  virtual void Attention(const AttentionArrays& arrays) = 0;
  virtual void AttentionBackward(const AttentionBackwardArrays& arrays) = 0;
  virtual void LogitTerms(const CrossEntropyArrays& arrays) = 0;
  virtual void LogitSums(const CrossEntropyArrays& arrays) = 0;
  virtual void CrossEntropy(const CrossEntropyArrays& arrays) = 0;
  // The mean of fp32 numbers, added in fp64.
  virtual void Mean(const float* numbers, int64_t count, float* mean) = 0;
  virtual void Embed(const EmbedArrays& arrays) = 0;
  virtual void EmbedBackward(const EmbedBackwardArrays& arrays) = 0;

  // Makes `calls`, which only calls these ops and enqueues nothing else. `key` is all that the
  // calls depend on: addresses, sizes, betas. On a GPU a key that comes again may be launched as a
  // CUDA graph, without another call; the bits are the same.
  virtual void Replay(std::span<const uint64_t> /*key*/, absl::FunctionRef<void()> calls) {
    calls();
  }
  // How many different keys may have a graph from now on. None at first, and on a device without
  // graphs. Earlier graphs are dropped.
  virtual void KeepGraphs(int64_t /*most*/) {}
  virtual GraphUse graphs() const { return {}; }

  // For products from now on; earlier choices stay.
  virtual void ChooseProducts(const ProductChoice& /*choice*/) {}
  // The choices since the last ChooseProducts, as letters of ProductChoice.
  virtual std::string product_letters() const { return ""; }
};

// The processor that sizes of memory depend on. The machine need not have it.
struct Processor {
  Processor(DeviceKind a_kind, int a_threads) : kind(a_kind), threads(a_threads) {}
  Processor(const Device& device);  // NOLINT: every device is a processor

  DeviceKind kind;
  int threads;  // of a CPU
};

// The dtype of logits for cross-entropy. On a GPU it is the compute dtype, because reading them
// takes the time.
DType LogitsDtype(const Processor& processor, DType compute);

// The sizes that the kernels' scratch depends on.
struct OpsLimits {
  int64_t rows = 0;  // tokens of a micro-batch, at most
  int64_t tokens = 0, width = 0, heads = 0, vocabulary = 0;
  int64_t attention_width = 0;  // of all heads; 0: width
  bool is_cut = false;          // AddBias, ColumnSums and LogitTerms are called
};

// Scratch is the caller's memory of the device, of at least so many bytes, aligned to 256,
// and outlives the ops.
int64_t ScratchBytes(const Processor& processor, DType compute, const OpsLimits& limits);
absl::StatusOr<std::unique_ptr<Ops>> NewOps(const Device& device, DType compute,
                                            const OpsLimits& limits, std::span<std::byte> scratch);

}  // namespace ebb::gpt
