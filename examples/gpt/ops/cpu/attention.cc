#include "ops/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "status_macros.h"

namespace ebb::gpt::cpu {
namespace {

constexpr int64_t kQueryRows = 64;

}  // namespace

// Sized for fp32 elements; an array in bf16 uses half of its part.
struct Attention::Scratch {
  float *queries, *keys, *values, *output_gradients;  // widened
  float *key_gradients, *value_gradients, *query_gradients;
  float *scores, *probabilities, *probability_gradients, *score_gradients;
  float* row_dots;

  Scratch(float* at, int64_t tokens, int64_t depth) {
    const auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
    queries = take(tokens * depth), keys = take(tokens * depth), values = take(tokens * depth);
    output_gradients = take(tokens * depth);
    key_gradients = take(tokens * depth), value_gradients = take(tokens * depth);
    query_gradients = take(kQueryRows * depth);
    scores = take(kQueryRows * tokens), probabilities = take(kQueryRows * tokens);
    probability_gradients = take(kQueryRows * tokens), score_gradients = take(kQueryRows * tokens);
    row_dots = take(tokens);
  }
};

// The products of a block of query rows. The block's last row sees `columns` keys.
struct Attention::Products {
  int64_t depth = 0;
  int64_t qkv_stride = 0, output_stride = 0, gradient_stride = 0;  // for a head's columns
  DType inputs = DType::kFloat32;

  GemmShape Scores(int64_t rows, int64_t columns) const {
    return {.m = rows,
            .n = columns,
            .k = depth,
            .a_stride = qkv_stride,
            .b_stride = qkv_stride,
            .c_stride = columns,
            .b_transposed = true,
            .inputs = inputs};
  }
  GemmShape ProbabilityGradients(int64_t rows, int64_t columns) const {
    GemmShape shape = Scores(rows, columns);
    shape.a_stride = gradient_stride;
    return shape;
  }
  GemmShape QueryGradients(int64_t rows, int64_t columns) const {
    return {.m = rows,
            .n = depth,
            .k = columns,
            .a_stride = columns,
            .b_stride = qkv_stride,
            .c_stride = depth,
            .inputs = inputs};
  }
  GemmShape Output(int64_t rows, int64_t columns) const {
    GemmShape shape = QueryGradients(rows, columns);
    shape.c_stride = output_stride;
    shape.output = inputs;
    return shape;
  }
  GemmShape KeyGradients(int64_t rows, int64_t columns, bool accumulate) const {
    return {.m = columns,
            .n = depth,
            .k = rows,
            .a_stride = columns,
            .b_stride = qkv_stride,
            .c_stride = depth,
            .a_transposed = true,
            .accumulate = accumulate,
            .inputs = inputs};
  }
  GemmShape ValueGradients(int64_t rows, int64_t columns, bool accumulate) const {
    GemmShape shape = KeyGradients(rows, columns, accumulate);
    shape.b_stride = gradient_stride;
    return shape;
  }
};

int64_t Attention::ScratchFloats(int64_t tokens, int64_t depth) {
  return 6 * tokens * depth + kQueryRows * depth + 4 * kQueryRows * tokens + tokens;
}

Attention::Attention(DType compute, Gemm& gemm)
    : compute_(compute),
      multiplied_(Gemm::HasNative(compute) ? compute : DType::kFloat32),
      gemm_(gemm) {}

Attention::Products Attention::ProductsOf(int64_t width, int64_t heads) const {
  const int64_t depth = width / heads;
  const bool widens = compute_ != multiplied_;
  return {.depth = depth,
          .qkv_stride = widens ? depth : 3 * width,
          .output_stride = widens ? depth : width,
          .gradient_stride = widens ? depth : width,
          .inputs = multiplied_};
}

absl::Status Attention::Prepare(const AttentionArrays& x) {
  const Products products = ProductsOf(x.width, x.heads);
  for (int64_t row = 0; row < x.tokens; row += kQueryRows) {
    const int64_t rows = std::min(kQueryRows, x.tokens - row), columns = row + rows;
    GPT_RETURN_IF_ERROR(gemm_.Prepare(products.Scores(rows, columns)));
    GPT_RETURN_IF_ERROR(gemm_.Prepare(products.Output(rows, columns)));
  }
  return absl::OkStatus();
}

absl::Status Attention::Prepare(const AttentionBackwardArrays& x) {
  const Products products = ProductsOf(x.width, x.heads);
  for (int64_t row = 0; row < x.tokens; row += kQueryRows) {
    const int64_t rows = std::min(kQueryRows, x.tokens - row), columns = row + rows;
    const bool accumulates = columns < x.tokens;
    for (const GemmShape& shape :
         {products.Scores(rows, columns), products.ProbabilityGradients(rows, columns),
          products.ValueGradients(rows, columns, accumulates),
          products.KeyGradients(rows, columns, accumulates),
          products.QueryGradients(rows, columns)})
      GPT_RETURN_IF_ERROR(gemm_.Prepare(shape));
  }
  return absl::OkStatus();
}

Block Attention::Widened(const void* matrix, int64_t first, int64_t stride, int64_t tokens,
                         int64_t depth, float* scratch) const {
  const void* data = At(matrix, compute_, first);
  if (compute_ == multiplied_) return {data, stride};
  Widen(compute_, {data, stride}, tokens, depth, scratch);
  return {scratch, depth};
}

void Attention::ForwardHead(const AttentionArrays& x, int64_t sequence, int64_t head,
                            float* memory) {
  const int64_t depth = x.width / x.heads, tokens = x.tokens;
  const Scratch scratch(memory, tokens, depth);
  const Products products = ProductsOf(x.width, x.heads);
  const int64_t first = sequence * tokens * 3 * x.width + head * depth;
  const Block q = Widened(x.qkv, first, 3 * x.width, tokens, depth, scratch.queries);
  const Block k = Widened(x.qkv, first + x.width, 3 * x.width, tokens, depth, scratch.keys);
  const Block v = Widened(x.qkv, first + 2 * x.width, 3 * x.width, tokens, depth, scratch.values);
  void* probabilities = multiplied_ == DType::kFloat32 ? scratch.scores : scratch.probabilities;

  for (int64_t row = 0; row < tokens; row += kQueryRows) {
    const int64_t rows = std::min(kQueryRows, tokens - row), columns = row + rows;
    gemm_.Run(products.Scores(rows, columns), At(q.data, multiplied_, row * q.stride), k.data,
              nullptr, scratch.scores);
    Softmax(multiplied_, {.scores = scratch.scores,
                          .probabilities = probabilities,
                          .log_sum_exp = x.log_sum_exp + (sequence * x.heads + head) * tokens + row,
                          .rows = rows,
                          .columns = columns,
                          .visible = row + 1,
                          .scale = 1 / std::sqrt(static_cast<float>(depth))});
    void* output = At(x.output, compute_, (sequence * tokens + row) * x.width + head * depth);
    const bool direct = compute_ == multiplied_;
    gemm_.Run(products.Output(rows, columns), probabilities, v.data, nullptr,
              direct ? output : scratch.query_gradients);
    if (!direct) {
      Store({.source = scratch.query_gradients,
             .target = {output, compute_, 0},
             .target_stride = x.width},
            rows, depth);
    }
  }
}

void Attention::BackwardHead(const AttentionBackwardArrays& x, int64_t sequence, int64_t head,
                             float* memory) {
  const int64_t depth = x.width / x.heads, tokens = x.tokens;
  const Scratch scratch(memory, tokens, depth);
  const Products products = ProductsOf(x.width, x.heads);
  const int64_t first = sequence * tokens * 3 * x.width + head * depth;
  const int64_t output_first = sequence * tokens * x.width + head * depth;
  const Block q = Widened(x.qkv, first, 3 * x.width, tokens, depth, scratch.queries);
  const Block k = Widened(x.qkv, first + x.width, 3 * x.width, tokens, depth, scratch.keys);
  const Block v = Widened(x.qkv, first + 2 * x.width, 3 * x.width, tokens, depth, scratch.values);
  const Block dy =
      Widened(x.output_gradient, output_first, x.width, tokens, depth, scratch.output_gradients);
  RowDots(compute_, {At(x.output, compute_, output_first), x.width},
          {At(x.output_gradient, compute_, output_first), x.width}, tokens, depth,
          scratch.row_dots);
  const bool is_float = multiplied_ == DType::kFloat32;
  void* probabilities = is_float ? scratch.scores : scratch.probabilities;
  void* score_gradients = is_float ? scratch.probability_gradients : scratch.score_gradients;

  // The last block sees every key and value, so it starts their sums.
  const int64_t last = (tokens - 1) / kQueryRows * kQueryRows;
  for (int64_t row = last; row >= 0; row -= kQueryRows) {
    const int64_t rows = std::min(kQueryRows, tokens - row), columns = row + rows;
    const void* query_rows = At(q.data, multiplied_, row * q.stride);
    const void* output_gradient_rows = At(dy.data, multiplied_, row * dy.stride);
    gemm_.Run(products.Scores(rows, columns), query_rows, k.data, nullptr, scratch.scores);
    gemm_.Run(products.ProbabilityGradients(rows, columns), output_gradient_rows, v.data, nullptr,
              scratch.probability_gradients);
    SoftmaxBackward(multiplied_,
                    {.forward = {.scores = scratch.scores,
                                 .probabilities = probabilities,
                                 .log_sum_exp = const_cast<float*>(x.log_sum_exp) +
                                                (sequence * x.heads + head) * tokens + row,
                                 .rows = rows,
                                 .columns = columns,
                                 .visible = row + 1,
                                 .scale = 1 / std::sqrt(static_cast<float>(depth))},
                     .probability_gradients = scratch.probability_gradients,
                     .row_dots = scratch.row_dots + row,
                     .score_gradients = score_gradients});
    gemm_.Run(products.ValueGradients(rows, columns, row != last), probabilities,
              output_gradient_rows, nullptr, scratch.value_gradients);
    gemm_.Run(products.KeyGradients(rows, columns, row != last), score_gradients, query_rows,
              nullptr, scratch.key_gradients);
    gemm_.Run(products.QueryGradients(rows, columns), score_gradients, k.data, nullptr,
              scratch.query_gradients);
    Store({.source = scratch.query_gradients,
           .target = {At(x.qkv_gradient, compute_, first + row * 3 * x.width), compute_, 0},
           .target_stride = 3 * x.width},
          rows, depth);
  }
  Store({.source = scratch.key_gradients,
         .target = {At(x.qkv_gradient, compute_, first + x.width), compute_, 0},
         .target_stride = 3 * x.width},
        tokens, depth);
  Store({.source = scratch.value_gradients,
         .target = {At(x.qkv_gradient, compute_, first + 2 * x.width), compute_, 0},
         .target_stride = 3 * x.width},
        tokens, depth);
}

}  // namespace ebb::gpt::cpu
