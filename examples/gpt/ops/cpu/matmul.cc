#include "ops/cpu/matmul.h"

#include <algorithm>

#include "status_macros.h"

namespace ebb::gpt::cpu {
namespace {

// Blocks of a few MiB: large enough for GEMM speed, small enough to stay in the caches between
// widening and product.
constexpr int64_t kRowsMax = 512, kColumnsMax = 512, kDepthMax = 1536;
// A thread's rows are multiples of a kernel's tile.
constexpr int64_t kRowGrain = 16;
// A weight's gradient in bf16 is summed in fp32 scratch of oneDNN, as large as the part that is
// computed at once.
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

bool Matmul::IsDirect(const MatmulArrays& arrays) const {
  const bool writes_target = arrays.c.dtype == DType::kFloat32 || arrays.c.dtype == multiplied_;
  const bool adds_bias = arrays.bias == nullptr || compute_ == multiplied_;
  return compute_ == multiplied_ && writes_target && adds_bias;
}

void Matmul::Run(const MatmulArrays& arrays) {
  if (IsDirect(arrays)) return RunDirect(arrays);
  RunBlocked(arrays);
}

absl::Status Matmul::Prepare(const MatmulArrays& x) {
  if (IsDirect(x)) return PrepareGemm(DirectShape(x));
  // Whole blocks along each extent, and the rest at its end.
  for (const int64_t rows : {std::min(kRowsMax, x.m), x.m % kRowsMax}) {
    for (const int64_t columns : {std::min(kColumnsMax, x.n), x.n % kColumnsMax}) {
      for (const int64_t depth : {std::min(kDepthMax, x.k), x.k % kDepthMax}) {
        for (const bool accumulate : {false, true}) {
          const bool comes = accumulate ? x.k > kDepthMax : depth == std::min(kDepthMax, x.k);
          if (rows == 0 || columns == 0 || depth == 0 || !comes) continue;
          GPT_RETURN_IF_ERROR(PrepareGemm(BlockShape(x, rows, columns, depth, accumulate)));
        }
      }
    }
  }
  return absl::OkStatus();
}

GemmShape Matmul::DirectShape(const MatmulArrays& x) const {
  return {.m = x.m,
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
}

GemmShape Matmul::BlockShape(const MatmulArrays& x, int64_t rows, int64_t columns, int64_t depth,
                             bool accumulate) const {
  const bool widens = compute_ != multiplied_;
  const int64_t a_stride = x.a_transposed ? x.m : x.k, b_stride = x.b_transposed ? x.k : x.n;
  return {.m = rows,
          .n = columns,
          .k = depth,
          .a_stride = !widens          ? a_stride
                      : x.a_transposed ? rows
                                       : depth,
          .b_stride = !widens          ? b_stride
                      : x.b_transposed ? depth
                                       : columns,
          .c_stride = columns,
          .a_transposed = x.a_transposed,
          .b_transposed = x.b_transposed,
          .accumulate = accumulate,
          .inputs = multiplied_};
}

void Matmul::RunDirect(const MatmulArrays& x) {
  RunGemm(DirectShape(x), x.a, x.b, x.bias, x.c.data);
}

int64_t Matmul::PartOf(const GemmShape& whole) const {
  const int64_t per_thread = (whole.m + team_.threads() - 1) / team_.threads();
  const bool has_sums = whole.a_transposed && whole.output != DType::kFloat32;
  const int64_t rows = has_sums ? std::min(per_thread, kSumsMax / whole.n) : per_thread;
  return std::max((rows + kRowGrain - 1) / kRowGrain, int64_t{1}) * kRowGrain;
}

absl::Status Matmul::PrepareGemm(GemmShape whole) {
  const int64_t part = PartOf(whole), last = whole.m % part;
  for (const int64_t rows : {std::min(part, whole.m), last}) {
    if (rows == 0) continue;
    whole.m = rows;
    GPT_RETURN_IF_ERROR(gemm_.Prepare(whole));
  }
  return absl::OkStatus();
}

void Matmul::RunGemm(const GemmShape& whole, const void* a, const void* b, const void* bias,
                     void* c) {
  const int64_t part = PartOf(whole);
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

Block Matmul::Widened(const void* matrix, int64_t stride, int64_t row, int64_t column, int64_t rows,
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
          a = x.a_transposed ? Widened(x.a, a_stride, k, m, depth, rows, a_scratch_)
                             : Widened(x.a, a_stride, m, k, rows, depth, a_scratch_);
          a_depth = k;
        }
        const Block b = x.b_transposed ? Widened(x.b, b_stride, n, k, columns, depth, b_scratch_)
                                       : Widened(x.b, b_stride, k, n, depth, columns, b_scratch_);
        RunGemm(BlockShape(x, rows, columns, depth, /*accumulate=*/k > 0), a.data, b.data, nullptr,
                c_scratch_);
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
