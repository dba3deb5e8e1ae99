// The arithmetic of the GPT, on whatever device runs it: one small interface, kernels behind it
// (ops/cpu).
//
// Matrices are row-major and contiguous; a row is one token. Activations are stored in the compute
// dtype, arithmetic and reductions are fp32. Gradients of parameters are written to a Target, whose
// dtype the engine chooses. The same call with the same number of threads gives the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ebb/runtime/config/dtype.h"

namespace ebb::gpt {

// Where a parameter's gradient goes: data = beta * data + gradient; beta is 0 (the contents are
// undefined) or 1.
struct Target {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  float beta = 0;
};

// c[m, n] = beta * c + a[m, k] b[k, n] + bias[n]
struct MatmulArrays {
  const void* a = nullptr;
  bool a_transposed = false;  // stored [k, m]
  const void* b = nullptr;
  bool b_transposed = false;   // stored [n, k], as a layer's weights are
  const void* bias = nullptr;  // in the compute dtype; null: none
  Target c = {};
  int64_t m = 0, n = 0, k = 0;
};

struct NormArrays {
  const void* input = nullptr;
  const void* residual = nullptr;  // null, or added to the input first; the sum goes to `sum`
  void* sum = nullptr;
  const void *weight = nullptr, *bias = nullptr;
  void* output = nullptr;
  float *mean = nullptr, *reciprocal_deviation = nullptr;  // a number each row
  int64_t rows = 0, width = 0;
};

struct NormBackwardArrays {
  const void* input = nullptr;  // of the norm: the sum, where there was a residual
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
  float* log_sum_exp = nullptr;  // [sequences, heads, tokens]: what backward needs of the softmax
  int64_t sequences = 0, tokens = 0, heads = 0, width = 0;
};

struct AttentionBackwardArrays {
  const void *qkv = nullptr, *output = nullptr, *output_gradient = nullptr;
  const float* log_sum_exp = nullptr;
  void* qkv_gradient = nullptr;
  int64_t sequences = 0, tokens = 0, heads = 0, width = 0;
};

// Losses of rows of logits (fp32), and their gradients: gradient = gradient_scale * (softmax -
// one-hot).
struct CrossEntropyArrays {
  const float* logits = nullptr;
  const int32_t* targets = nullptr;
  float* losses = nullptr;  // one a row
  void* gradient =
      nullptr;  // null: losses only. In the compute dtype; may be `logits` if that is fp32
  float gradient_scale = 1;
  int64_t rows = 0, vocabulary = 0;
};

struct EmbedArrays {
  const void *token_table = nullptr,
             *position_table = nullptr;  // [vocabulary, width], [context, width]
  const int32_t* ids = nullptr;          // [sequences * tokens]
  void* output = nullptr;
  int64_t sequences = 0, tokens = 0, width = 0;
};

struct EmbedBackwardArrays {
  const void* output_gradient = nullptr;
  const int32_t* ids = nullptr;
  Target token_gradient = {}, position_gradient = {};
  int64_t sequences = 0, tokens = 0, width = 0, vocabulary = 0, context = 0;
};

class Ops {
 public:
  virtual ~Ops() = default;

  virtual void Matmul(const MatmulArrays& arrays) = 0;
  virtual void Norm(const NormArrays& arrays) = 0;
  virtual void NormBackward(const NormBackwardArrays& arrays) = 0;
  // GELU with the tanh approximation (Hendrycks & Gimpel 2016, section 2), as GPT-2 has it.
  virtual void Gelu(const void* input, void* output, int64_t count) = 0;
  // Both the output again and, in place, its gradient turned into the input's.
  virtual void GeluBackward(const void* input, void* output, void* gradient, int64_t count) = 0;
  virtual void Attention(const AttentionArrays& arrays) = 0;
  virtual void AttentionBackward(const AttentionBackwardArrays& arrays) = 0;
  virtual void Add(const void* a, const void* b, void* sum, int64_t count) = 0;
  // The gradient of a bias: sums over the rows.
  virtual void ColumnSums(const void* matrix, int64_t rows, int64_t columns, Target sums) = 0;
  virtual void CrossEntropy(const CrossEntropyArrays& arrays) = 0;
  virtual void Embed(const EmbedArrays& arrays) = 0;
  virtual void EmbedBackward(const EmbedBackwardArrays& arrays) = 0;
};

// What the scratch of the kernels depends on.
struct OpsLimits {
  int64_t rows = 0;  // tokens of a micro-batch, the most
  int64_t tokens = 0, width = 0, heads = 0, vocabulary = 0;
};

// Threads of one rank. Scratch is the caller's, of at least CpuScratchBytes, aligned to 64 bytes,
// and outlives the ops.
int64_t CpuScratchBytes(DType compute, int threads, const OpsLimits& limits);
std::unique_ptr<Ops> NewCpuOps(DType compute, int threads, std::span<std::byte> scratch);

}  // namespace ebb::gpt
