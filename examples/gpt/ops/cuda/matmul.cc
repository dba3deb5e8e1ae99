#include "ops/cuda/matmul.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cuda/error.h"
#include "ebb/runtime/trace/log.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/product.h"
#include "status_macros.h"

namespace ebb::gpt::cuda {
namespace {

// NVIDIA's recommendation for Hopper (cuBLAS, "cublasSetWorkspace").
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
// For products that go through fp32, in pieces of rows.
constexpr int64_t kPieceBytes = int64_t{16} << 20;

absl::Status Launched(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("launching ", what, " failed: ", cudaGetErrorString(result)));
}

// How long the device takes for enqueued work. For use before training, because it waits for the
// stream.
class LaunchTimer {
 public:
  // For a stream of the current device.
  static absl::StatusOr<LaunchTimer> Create(cudaStream_t stream) {
    LaunchTimer timer(stream);
    for (Event* event : {&timer.begin_, &timer.end_}) {
      cudaEvent_t made = nullptr;
      GPT_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&made, cudaEventDefault),
                                     "creating an event that measures"));
      event->reset(made);
    }
    return timer;
  }

  // The least of a few measurements of one call of `enqueue`. The first call is not measured,
  // because it loads kernels. Several launches are timed together, so that the queue is not empty
  // between short ones.
  absl::StatusOr<float> Milliseconds(absl::FunctionRef<absl::Status()> enqueue) {
    constexpr int kRepetitions = 3, kLaunches = 3;
    GPT_RETURN_IF_ERROR(enqueue());
    float least = std::numeric_limits<float>::infinity();
    for (int i = 0; i < kRepetitions; ++i) {
      cudaError_t result = cudaEventRecord(begin_.get(), stream_);
      for (int n = 0; n < kLaunches; ++n) GPT_RETURN_IF_ERROR(enqueue());
      if (result == cudaSuccess) result = cudaEventRecord(end_.get(), stream_);
      if (result == cudaSuccess) result = cudaEventSynchronize(end_.get());
      float took = 0;
      if (result == cudaSuccess) result = cudaEventElapsedTime(&took, begin_.get(), end_.get());
      GPT_RETURN_IF_ERROR(CudaStatus(result, "timing a product"));
      least = std::min(least, took / kLaunches);
    }
    return least;
  }

 private:
  using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, decltype(&cudaEventDestroy)>;

  explicit LaunchTimer(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream_;
  Event begin_{nullptr, &cudaEventDestroy}, end_{nullptr, &cudaEventDestroy};
};

class FusedMatmul final : public Matmul {
 public:
  FusedMatmul(DType compute, ProductPlans plans, std::span<std::byte> pieces)
      : compute_(compute), plans_(std::move(plans)), pieces_(pieces) {}

  absl::Status Run(cudaStream_t stream, const MatmulArrays& x) override {
    if (x.m == 0 || x.n == 0) return absl::OkStatus();
    const std::optional<Product> fused = Fusable(x);
    const ProductPlans::Key key = ProductPlans::KeyOf(fused ? *fused : Plain(x));
    auto way = ways_.find(key);
    if (way == ways_.end()) {
      GPT_ASSIGN_OR_RETURN(const ProductWay chosen, NewWay(stream, x, fused));
      letters_.push_back(chosen.letter());
      way = ways_.emplace(key, chosen).first;
    }
    return RunAs(way->second, stream, x, fused);
  }

  void Choose(const ProductChoice& choice) override {
    choice_ = choice;
    letters_.clear();
  }
  std::string letters() const override { return letters_; }

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

  // The product with all that cuBLASLt might fuse; nothing if there is nothing to fuse.
  std::optional<Product> Fusable(const MatmulArrays& x) const {
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
      return std::nullopt;
    }
    return product;
  }

  absl::StatusOr<ProductWay> NewWay(cudaStream_t stream, const MatmulArrays& x,
                                    const std::optional<Product>& fused) {
    const ProductWay by_default = {.fused = fused.has_value() && fused->fused != Fused::kASums};
    if (choice_.measures) return Fastest(by_default, stream, x, fused);
    if (letters_.size() >= choice_.letters.size()) return by_default;
    return ProductWay::Of(choice_.letters[letters_.size()]).value_or(by_default);
  }

  // A way other than the default must be faster by more than the noise.
  absl::StatusOr<ProductWay> Fastest(const ProductWay& by_default, cudaStream_t stream,
                                     const MatmulArrays& x, const std::optional<Product>& fused) {
    constexpr float kWorthIt = 0.97f;
    GPT_ASSIGN_OR_RETURN(LaunchTimer timer, LaunchTimer::Create(stream));
    const auto time = [&](const ProductWay& way) {
      return timer.Milliseconds([&] { return RunAs(way, stream, x, fused); });
    };
    ProductWay best = by_default;
    GPT_ASSIGN_OR_RETURN(const float usual, time(by_default));
    float least = usual * kWorthIt;
    for (const bool fuses : {false, true}) {
      if (fuses && !fused) continue;
      MatmulArrays alone = x;
      if (x.before_gelu != nullptr) alone.c.data = x.before_gelu;
      GPT_ASSIGN_OR_RETURN(const int answers, plans_.Answers(fuses ? *fused : Plain(alone)));
      for (int answer = 0; answer < answers; ++answer) {
        const ProductWay way = {.fused = fuses, .answer = answer};
        if (way == by_default) continue;
        GPT_ASSIGN_OR_RETURN(const float took, time(way));
        if (took >= least) continue;
        best = way;
        least = took;
      }
    }
    return best;
  }

  // If cuBLASLt does not fuse it, it is run apart.
  absl::Status RunAs(const ProductWay& way, cudaStream_t stream, const MatmulArrays& x,
                     const std::optional<Product>& fused) {
    if (way.fused && fused) {
      GPT_ASSIGN_OR_RETURN(const bool ran, plans_.TryRun(stream, *fused, way.answer));
      if (ran) return AfterFused(stream, x, fused->fused);
    }
    return RunApart(stream, x, way.fused ? 0 : way.answer);
  }

  // The parts that cuBLASLt never fuses, or has not fused this time.
  absl::Status AfterFused(cudaStream_t stream, const MatmulArrays& x, Fused done) {
    if (x.gelu_input != nullptr) {
      GPT_RETURN_IF_ERROR(
          Launched(LaunchGelu(stream, compute_, x.gelu_input, x.gelu_output, x.m * x.n), "a GELU"));
    }
    return x.a_sums.data == nullptr || done == Fused::kASums ? absl::OkStatus() : SumA(stream, x);
  }

  // The product alone by cuBLASLt, and the rest by kernels.
  absl::Status RunApart(cudaStream_t stream, const MatmulArrays& x, int answer) {
    MatmulArrays plain = x;
    if (x.before_gelu != nullptr) plain.c.data = x.before_gelu;
    GPT_ASSIGN_OR_RETURN(const bool ran, plans_.TryRun(stream, Plain(plain), answer));
    if (!ran) GPT_RETURN_IF_ERROR(RunThroughFloat32(stream, plain));
    const int64_t count = x.m * x.n;
    if (x.before_gelu != nullptr) {
      GPT_RETURN_IF_ERROR(
          Launched(LaunchGelu(stream, compute_, x.before_gelu, x.c.data, count), "a GELU"));
    }
    if (x.gelu_input != nullptr) {
      GPT_RETURN_IF_ERROR(Launched(
          LaunchGeluBackward(stream, compute_, x.gelu_input, x.gelu_output, x.c.data, count),
          "a GELU's backward"));
    }
    return x.a_sums.data == nullptr ? absl::OkStatus() : SumA(stream, x);
  }

  // For a `product` with fp32 results for which cuBLASLt has no algorithm.
  absl::Status RunPlain(cudaStream_t stream, const Product& product) {
    if (!std::exchange(warned_, true)) {
      LogWarning(absl::StrCat("cuBLASLt has no algorithm for a product of ", product.m, " x ",
                              product.n, " x ", product.k, " of ", std::string(Name(compute_)),
                              ", so a plain kernel computes it and others like it, slowly"));
    }
    const int64_t b_columns = product.b_transposed ? product.k : product.n;
    return Launched(LaunchPlainProduct(stream, compute_,
                                       {.a = product.a,
                                        .b = product.b,
                                        .c = static_cast<float*>(product.c),
                                        .m = product.m,
                                        .n = product.n,
                                        .k = product.k,
                                        .a_row = product.a_transposed ? 1 : product.a_stride,
                                        .a_depth = product.a_transposed ? product.a_stride : 1,
                                        .b_depth = product.b_transposed ? 1 : b_columns,
                                        .b_column = product.b_transposed ? b_columns : 1}),
                    "a plain product");
  }

  // For products with a target dtype that cuBLASLt does not write, or a bias that it does not add.
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
      GPT_ASSIGN_OR_RETURN(const bool ran, plans_.TryRun(stream, product, /*answer=*/0));
      if (!ran) GPT_RETURN_IF_ERROR(RunPlain(stream, product));
      Target target = x.c;
      target.data = static_cast<std::byte*>(x.c.data) + row * x.n * SizeOf(x.c.dtype);
      GPT_RETURN_IF_ERROR(
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
  std::map<ProductPlans::Key, ProductWay> ways_;
  ProductChoice choice_;
  std::string letters_;
  bool warned_ = false;
};

}  // namespace

int64_t Matmul::ScratchBytes(DType, const OpsLimits& limits) {
  // The widest matrix with sums of columns is a block's hidden one.
  const int64_t partials = ColumnSumsParts(limits.rows) * 4 * limits.width * int64_t{sizeof(float)};
  return kWorkspaceBytes + std::max(kPieceBytes, partials);
}

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Create(DType compute,
                                                       std::span<std::byte> scratch) {
  GPT_ASSIGN_OR_RETURN(ProductPlans plans, ProductPlans::Create(scratch.first(kWorkspaceBytes)));
  return std::make_unique<FusedMatmul>(compute, std::move(plans), scratch.subspan(kWorkspaceBytes));
}

}  // namespace ebb::gpt::cuda
