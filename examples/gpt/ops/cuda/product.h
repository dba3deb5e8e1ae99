// One product as cuBLASLt computes it, and the plans of all products so far: descriptors, and the
// algorithms that the heuristic names first. A plan is made when a shape comes for the first time.
//
// cuBLASLt's matrices are column-major. Read that way, a row-major c = a b is c' = b' a':
// cuBLASLt's A is our b, and its rows are our columns.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ops/cuda/cublaslt.h"

namespace ebb::gpt::cuda {

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
