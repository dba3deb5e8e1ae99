#include "ops/cpu/matmul.h"

#include <algorithm>

namespace ebb::gpt::cpu {
namespace {

// Blocks of a few MiB: large enough for GEMM speed, small enough to stay in the caches between
// widening and product.
constexpr int64_t kRowsMax = 512, kColumnsMax = 512, kDepthMax = 1536;
// A thread's rows are multiples of a kernel's tile.
constexpr int64_t kRowGrain = 16;
// A weight's gradient in bf16 is summed in fp32 scratch of oneDNN's, as large as what is asked for at
// once.
constexpr int64_t kSumsMax = int64_t{1} << 18;

}  // namespace

Matmul::Matmul(DType compute, Gemm& gemm, ThreadTeam& team, std::span<float> scratch)
    : compute_(compute),
      multiplied_(Gemm::HasNative(compute) ? compute : DType::kFloat32),
      gemm_(gemm),
      team_(team),
      c_scratch_(scratch.data()) {
  a_scratch_ = c_scratch_ + kRowsMax * kColumnsMax;
  b_scratch_ = a_scratch_ + kRowsMax * kDepthMax;
}

int64_t Matmul::ScratchFloats(DType compute) {
  const int64_t c = kRowsMax * kColumnsMax;
  return Gemm::HasNative(compute) ? c : c + kRowsMax * kDepthMax + kDepthMax * kColumnsMax;
}

void Matmul::Run(const MatmulArrays& arrays) {
  const bool writes_target = arrays.c.dtype == DType::kFloat32 || arrays.c.dtype == multiplied_;
  const bool adds_bias = arrays.bias == nullptr || compute_ == multiplied_;
  if (compute_ == multiplied_ && writes_target && adds_bias) return RunDirect(arrays);
  RunBlocked(arrays);
}

void Matmul::RunDirect(const MatmulArrays& x) {
  const GemmShape shape = {.m = x.m,
                           .n = x.n,
                           .k = x.k,
                           .a_stride = x.a_transposed ? x.m : x.k,
                           .b_stride = x.b_transposed ? x.k : x.n,
                           .c_stride = x.n,
                           .a_transposed = x.a_transposed,
                           .b_transposed = x.b_transposed,
                           .bias = x.bias != nullptr,
                           .accumulate = x.c.beta != 0,
                           .inputs = compute_,
                           .output = x.c.dtype};
  RunGemm(shape, x.a, x.b, x.bias, x.c.data);
}

void Matmul::RunGemm(const GemmShape& whole, const void* a, const void* b, const void* bias,
                     void* c) {
  const int64_t per_thread = (whole.m + team_.threads() - 1) / team_.threads();
  const bool has_sums = whole.a_transposed && whole.output != DType::kFloat32;
  const int64_t rows = has_sums ? std::min(per_thread, kSumsMax / whole.n) : per_thread;
  const int64_t part = std::max((rows + kRowGrain - 1) / kRowGrain, int64_t{1}) * kRowGrain;
  team_.Run((whole.m + part - 1) / part, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t row = p * part;
      GemmShape shape = whole;
      shape.m = std::min(part, whole.m - row);
      gemm_.Run(shape, At(a, whole.inputs, whole.a_transposed ? row : row * whole.a_stride), b,
                bias, At(c, whole.output, row * whole.c_stride));
    }
  });
}

Block Matmul::Prepare(const void* matrix, int64_t stride, int64_t row, int64_t column, int64_t rows,
                      int64_t columns, float* scratch) {
  const Block block = {At(matrix, compute_, row * stride + column), stride};
  if (compute_ == multiplied_) return block;
  team_.Run(rows, 8, [&](int64_t begin, int64_t end) {
    Widen(compute_, {At(block.data, compute_, begin * stride), stride}, end - begin, columns,
          scratch + begin * columns);
  });
  return {scratch, columns};
}

void Matmul::RunBlocked(const MatmulArrays& x) {
  const int64_t a_stride = x.a_transposed ? x.m : x.k, b_stride = x.b_transposed ? x.k : x.n;
  for (int64_t m = 0; m < x.m; m += kRowsMax) {
    const int64_t rows = std::min(kRowsMax, x.m - m);
    Block a;
    int64_t a_depth =
        -1;  // where the block in `a` begins; it serves all columns if one block spans the depth
    for (int64_t n = 0; n < x.n; n += kColumnsMax) {
      const int64_t columns = std::min(kColumnsMax, x.n - n);
      for (int64_t k = 0; k < x.k; k += kDepthMax) {
        const int64_t depth = std::min(kDepthMax, x.k - k);
        if (a_depth != k) {
          a = x.a_transposed ? Prepare(x.a, a_stride, k, m, depth, rows, a_scratch_)
                             : Prepare(x.a, a_stride, m, k, rows, depth, a_scratch_);
          a_depth = k;
        }
        const Block b = x.b_transposed ? Prepare(x.b, b_stride, n, k, columns, depth, b_scratch_)
                                       : Prepare(x.b, b_stride, k, n, depth, columns, b_scratch_);
        RunGemm({.m = rows,
                 .n = columns,
                 .k = depth,
                 .a_stride = a.stride,
                 .b_stride = b.stride,
                 .c_stride = columns,
                 .a_transposed = x.a_transposed,
                 .b_transposed = x.b_transposed,
                 .accumulate = k > 0,
                 .inputs = multiplied_},
                a.data, b.data, nullptr, c_scratch_);
      }
      team_.Run(rows, 8, [&](int64_t begin, int64_t end) {
        Store({.source = c_scratch_ + begin * columns,
               .bias = x.bias == nullptr ? nullptr : At(x.bias, compute_, n),
               .bias_dtype = compute_,
               .target = {At(x.c.data, x.c.dtype, (m + begin) * x.n + n), x.c.dtype, x.c.beta},
               .target_stride = x.n},
              end - begin, columns);
      });
    }
  }
}

}  // namespace ebb::gpt::cpu
