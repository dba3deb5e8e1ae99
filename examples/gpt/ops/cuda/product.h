// One product as cuBLASLt computes it, and the plans of all products so far: descriptors, and the
// algorithms that the heuristic names first. A plan is made when a shape comes for the first time.
//
// cuBLASLt's matrices are column-major. Read that way, a row-major c = a b is c' = b' a':
// cuBLASLt's A is our b, and its rows are our columns.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/opened_library.h"

namespace ebb::gpt::cuda {

// cuBLASLt's functions, opened when the first ops on a GPU are made
// (runtime/device/opened_library.h), so that a program starts without a CUDA toolkit. Any version
// with the major number of the build's headers works, because all functions used here have existed
// since 12.0.
struct CublasLt : LibraryFunctions {
  using LibraryFunctions::LibraryFunctions;
  decltype(&::cublasLtCreate) Create = Find("cublasLtCreate");
  decltype(&::cublasLtDestroy) Destroy = Find("cublasLtDestroy");
  decltype(&::cublasLtGetStatusString) GetStatusString = Find("cublasLtGetStatusString");
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate = Find("cublasLtMatmulDescCreate");
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy = Find("cublasLtMatmulDescDestroy");
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute =
      Find("cublasLtMatmulDescSetAttribute");
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate = Find("cublasLtMatrixLayoutCreate");
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy =
      Find("cublasLtMatrixLayoutDestroy");
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate =
      Find("cublasLtMatmulPreferenceCreate");
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy =
      Find("cublasLtMatmulPreferenceDestroy");
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute =
      Find("cublasLtMatmulPreferenceSetAttribute");
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic =
      Find("cublasLtMatmulAlgoGetHeuristic");
  decltype(&::cublasLtMatmul) Matmul = Find("cublasLtMatmul");
};

// kUnavailable says what is missing, or which version does not work.
absl::StatusOr<CublasLt> OpenCublasLt();
// The result of the first call, for the whole life of the process.
absl::StatusOr<const CublasLt*> LoadCublasLt();

// OK for CUBLAS_STATUS_SUCCESS.
absl::Status CublasStatus(const CublasLt& library, cublasStatus_t result, std::string_view what);

// The ways to compute a product. Either the rest of the work is fused into cuBLASLt's kernel, or
// our kernels do it after the product. Each way has one of the algorithms that cuBLASLt's heuristic
// names. Only a measurement shows which is faster, because fusing restricts cuBLASLt to other
// kernels, and the heuristic's first answer is not always the best.
//
// Each way has a letter. A, B, C and D are fused ways with the first, second, third and fourth
// algorithm; a, b, c and d are the others.
struct ProductWay {
  static constexpr int kAnswersMax = 4;

  bool fused = false;
  int answer = 0;

  char letter() const { return static_cast<char>((fused ? 'A' : 'a') + answer); }
  static std::optional<ProductWay> Of(char letter) {
    for (const char first : {'A', 'a'}) {
      if (letter >= first && letter < first + kAnswersMax)
        return ProductWay{.fused = first == 'A', .answer = letter - first};
    }
    return std::nullopt;
  }
  friend bool operator==(const ProductWay&, const ProductWay&) = default;
};

// Work that is fused into a product. kGelu: also with the bias if there is one.
enum class Fused : uint8_t { kNothing, kBias, kGelu, kGeluBackward, kASums };

struct Product {
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false, b_transposed = false;
  int64_t a_stride = 0;  // elements from one stored row to the next
  DType inputs = DType::kFloat32, output = DType::kFloat32;
  Fused fused = Fused::kNothing;
  const void *a = nullptr, *b = nullptr;
  const void* added = nullptr;  // of the output's dtype; null: nothing. May be c
  void* c = nullptr;
  const void* bias = nullptr;  // of the inputs' dtype, or null
  void* gelu_input = nullptr;  // written by kGelu, read by kGeluBackward
  void* a_sums = nullptr;      // of the output's dtype
};

class ProductPlans {
 public:
  // From the reference of cuBLASLt (cublasLtMatmul, "workspace").
  static constexpr int64_t kWorkspaceAlignment = 256;

  // Workspace is memory of the current device, aligned to kWorkspaceAlignment.
  static absl::StatusOr<ProductPlans> Create(std::span<std::byte> workspace);
  ProductPlans(ProductPlans&&) noexcept;
  ~ProductPlans();

  // Runs with the algorithm that the heuristic's `answer` names, counted from 0; with another one
  // if there is none. False, with nothing enqueued, if cuBLASLt does not offer the product. An
  // algorithm that the heuristic names may still fail to run (cublasLt.h). One that is refused at
  // its first launch counts as not offered.
  absl::StatusOr<bool> TryRun(cudaStream_t stream, const Product& product, int answer);
  // How many algorithms there are to choose from.
  absl::StatusOr<int> Answers(const Product& product);

  // All that an algorithm depends on.
  struct Key {
    int64_t m, n, k, a_stride;
    bool a_transposed, b_transposed, adds, has_bias;
    DType inputs, output;
    Fused fused;
    uint32_t a_alignment, b_alignment, added_alignment, c_alignment;
    uint32_t vector_alignment, gelu_alignment;  // of the bias or the sums, and of GELU's input
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  static Key KeyOf(const Product& product);

 private:
  class Plan;
  ProductPlans(const CublasLt& library, std::span<std::byte> workspace);
  // Null if cuBLASLt does not offer it.
  absl::StatusOr<Plan*> Find(const Product& product);
  absl::StatusOr<std::unique_ptr<Plan>> Make(const Key& key, const Product& product) const;
  cublasStatus_t Launch(cudaStream_t stream, const Plan& plan,
                        const cublasLtMatmulAlgo_t& algorithm, const Product& product) const;

  const CublasLt* library_;
  std::span<std::byte> workspace_;
  std::unique_ptr<cublasLtContext, decltype(&::cublasLtDestroy)> handle_;
  std::map<Key, std::unique_ptr<Plan>> plans_;  // null: not offered
};

}  // namespace ebb::gpt::cuda
