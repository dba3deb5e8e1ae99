#include "ops/cuda/matmul.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ops/cuda/element_wise.h"
#include "ops/cuda/product.h"
#include "ops/cuda/store.h"

namespace ebb::gpt::cuda {
namespace {

// What NVIDIA recommends on Hopper (cuBLAS, "cublasSetWorkspace").
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
// Of products that take the way through fp32, in pieces of rows.
constexpr int64_t kPieceBytes = int64_t{16} << 20;

absl::Status Launched(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("launching ", what, " failed: ", cudaGetErrorString(result)));
}

class FusedMatmul final : public Matmul {
 public:
  FusedMatmul(DType compute, ProductPlans plans, std::span<std::byte> pieces)
      : compute_(compute), plans_(std::move(plans)), pieces_(pieces) {}

  absl::Status Run(cudaStream_t stream, const MatmulArrays& x) override {
    if (x.m == 0 || x.n == 0) return absl::OkStatus();
    EBB_ASSIGN_OR_RETURN(const bool fused, RunFused(stream, x));
    if (!fused) EBB_RETURN_IF_ERROR(RunApart(stream, x));
    return absl::OkStatus();
  }

 private:
  Product Plain(const MatmulArrays& x) const {
    return {.m = x.m,
            .n = x.n,
            .k = x.k,
            .a_transposed = x.a_transposed,
            .b_transposed = x.b_transposed,
            .a_stride = x.a_transposed ? x.m : x.k,
            .inputs = compute_,
            .output = x.c.dtype,
            .fused = x.bias == nullptr ? Fused::kNothing : Fused::kBias,
            .a = x.a,
            .b = x.b,
            .added = x.c.beta != 0 ? x.c.data : x.added,
            .c = x.c.data,
            .bias = x.bias};
  }

  absl::StatusOr<bool> TryRun(cudaStream_t stream, const Product& product) {
    EBB_ASSIGN_OR_RETURN(const ProductPlans::Plan* const plan, plans_.Find(product));
    if (plan == nullptr) return false;
    EBB_RETURN_IF_ERROR(plans_.Run(stream, *plan, product));
    return true;
  }

  // With all that cuBLASLt takes on, and kernels for the rest; false where it takes nothing on.
  absl::StatusOr<bool> RunFused(cudaStream_t stream, const MatmulArrays& x) {
    Product product = Plain(x);
    if (x.before_gelu != nullptr) {
      product.fused = Fused::kGelu;
      product.gelu_input = x.before_gelu;
    } else if (x.gelu_input != nullptr) {
      product.fused = Fused::kGeluBackward;
      product.gelu_input = const_cast<void*>(x.gelu_input);
    } else if (x.a_sums.data != nullptr && x.a_sums.beta == 0 && x.a_sums.dtype == x.c.dtype &&
               x.bias == nullptr) {
      product.fused = Fused::kASums;
      product.a_sums = x.a_sums.data;
    } else {
      return false;
    }
    EBB_ASSIGN_OR_RETURN(const bool ran, TryRun(stream, product));
    if (ran && x.gelu_input != nullptr) {
      EBB_RETURN_IF_ERROR(
          Launched(LaunchGelu(stream, compute_, x.gelu_input, x.gelu_output, x.m * x.n), "a GELU"));
    }
    if (ran && x.a_sums.data != nullptr && product.fused != Fused::kASums)
      EBB_RETURN_IF_ERROR(SumA(stream, x));
    return ran;
  }

  // The product alone, and all else by kernels.
  absl::Status RunApart(cudaStream_t stream, const MatmulArrays& x) {
    MatmulArrays plain = x;
    if (x.before_gelu != nullptr) plain.c.data = x.before_gelu;
    EBB_ASSIGN_OR_RETURN(const bool ran, TryRun(stream, Plain(plain)));
    if (!ran) EBB_RETURN_IF_ERROR(RunThroughFloat32(stream, plain));
    const int64_t count = x.m * x.n;
    if (x.before_gelu != nullptr) {
      EBB_RETURN_IF_ERROR(
          Launched(LaunchGelu(stream, compute_, x.before_gelu, x.c.data, count), "a GELU"));
    }
    if (x.gelu_input != nullptr) {
      EBB_RETURN_IF_ERROR(Launched(
          LaunchGeluBackward(stream, compute_, x.gelu_input, x.gelu_output, x.c.data, count),
          "a GELU's backward"));
    }
    return x.a_sums.data == nullptr ? absl::OkStatus() : SumA(stream, x);
  }

  // Where cuBLASLt does not write the target's dtype, or does not add the bias to it.
  absl::Status RunThroughFloat32(cudaStream_t stream, const MatmulArrays& x) {
    auto* const piece = reinterpret_cast<float*>(pieces_.data());
    const auto room = static_cast<int64_t>(pieces_.size() / sizeof(float));
    const int64_t rows_max = std::max<int64_t>(room / x.n / 16 * 16, 1);
    if (room < x.n) {
      return absl::UnimplementedError(absl::StrCat(
          "a product with ", x.n, " columns of ", std::string(Name(x.c.dtype)), " from ",
          std::string(Name(compute_)),
          " is more than fits: set communication_data_type to fp32 or to the compute dtype"));
    }
    for (int64_t row = 0; row < x.m; row += rows_max) {
      const int64_t rows = std::min(rows_max, x.m - row);
      Product product = Plain(x);
      product.m = rows;
      product.output = DType::kFloat32;
      product.fused = Fused::kNothing;
      product.added = product.bias = nullptr;
      product.c = piece;
      product.a = static_cast<const std::byte*>(x.a) +
                  (x.a_transposed ? row : row * x.k) * SizeOf(compute_);
      EBB_ASSIGN_OR_RETURN(const bool ran, TryRun(stream, product));
      if (!ran) {
        return absl::UnimplementedError(absl::StrCat("cuBLASLt multiplies no matrices of ",
                                                     std::string(Name(compute_)), " here, ", x.m,
                                                     " x ", x.n, " x ", x.k));
      }
      Target target = x.c;
      target.data = static_cast<std::byte*>(x.c.data) + row * x.n * SizeOf(x.c.dtype);
      EBB_RETURN_IF_ERROR(
          Launched(LaunchStore(stream, piece, rows, x.n, x.bias, compute_, target), "a store"));
    }
    if (x.added == nullptr) return absl::OkStatus();
    return Launched(LaunchAdd(stream, compute_, x.c.data, x.added, x.c.data, x.m * x.n),
                    "an addition");
  }

  absl::Status SumA(cudaStream_t stream, const MatmulArrays& x) {
    return Launched(LaunchColumnSums(stream, compute_, x.a, x.k, x.m,
                                     reinterpret_cast<float*>(pieces_.data()), x.a_sums),
                    "sums of columns");
  }

  const DType compute_;
  ProductPlans plans_;
  const std::span<std::byte> pieces_;
};

}  // namespace

int64_t Matmul::ScratchBytes(DType, const OpsLimits& limits) {
  // The widest matrix whose columns are summed is a block's hidden one.
  const int64_t partials = ColumnSumsParts(limits.rows) * 4 * limits.width * int64_t{sizeof(float)};
  return kWorkspaceBytes + std::max(kPieceBytes, partials);
}

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Create(DType compute,
                                                       std::span<std::byte> scratch) {
  EBB_ASSIGN_OR_RETURN(ProductPlans plans, ProductPlans::Create(scratch.first(kWorkspaceBytes)));
  return std::make_unique<FusedMatmul>(compute, std::move(plans), scratch.subspan(kWorkspaceBytes));
}

}  // namespace ebb::gpt::cuda
