#include "ops/cuda/product.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "status_macros.h"

namespace ebb::gpt::cuda {
namespace {

// The library returns CUBLAS_VERSION.
LibraryVersion AskVersion(void* get_version) {
  const auto code =
      static_cast<int>(reinterpret_cast<decltype(&::cublasLtGetVersion)>(get_version)());
  return {code / 10000, code / 100 % 100, code % 100};
}

// Algorithms need at most 16 bytes.
uint32_t AlignmentOf(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return address == 0 ? 16 : 1u << std::min(std::countr_zero(address), 4);
}

cudaDataType_t CudaType(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

// Results of cublasLtMatmul for a call that it does not support, before it enqueues anything.
bool IsRefusal(cublasStatus_t result) {
  return result == CUBLAS_STATUS_NOT_SUPPORTED || result == CUBLAS_STATUS_INVALID_VALUE;
}

cublasLtEpilogue_t EpilogueOf(Fused fused, bool has_bias) {
  switch (fused) {
    case Fused::kNothing:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Fused::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Fused::kGelu:
      return has_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Fused::kGeluBackward:
      return CUBLASLT_EPILOGUE_DGELU;
    case Fused::kASums:
      return CUBLASLT_EPILOGUE_BGRADB;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

}  // namespace

absl::StatusOr<CublasLt> OpenCublasLt() {
  GPT_ASSIGN_OR_RETURN(
      const OpenedLibrary library,
      OpenedLibrary::Open({.name = "cuBLASLt",
                           .file = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR),
                           .needed_for = "matrix products on a GPU",
                           .instead = "use --device cpu",
                           .oldest = {.major = CUBLAS_VER_MAJOR, .minor = 0, .patch = 0},
                           .version_function = "cublasLtGetVersion",
                           .version = &AskVersion}));
  CublasLt lt(library);
  GPT_RETURN_IF_ERROR(lt.found());
  return lt;
}

absl::StatusOr<const CublasLt*> LoadCublasLt() {
  static const absl::StatusOr<CublasLt>& loaded = *new absl::StatusOr<CublasLt>(OpenCublasLt());
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

absl::Status CublasStatus(const CublasLt& library, cublasStatus_t result, std::string_view what) {
  if (result == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(absl::string_view(what.data(), what.size()),
                                          " failed: ", library.GetStatusString(result),
                                          "; CUBLASLT_LOG_LEVEL=2 in the environment says more"));
}

class ProductPlans::Plan {
 public:
  explicit Plan(const CublasLt& library)
      : description(nullptr, library.MatmulDescDestroy),
        a(nullptr, library.MatrixLayoutDestroy),
        b(nullptr, library.MatrixLayoutDestroy),
        c(nullptr, library.MatrixLayoutDestroy) {}

  using Layout =
      std::unique_ptr<cublasLtMatrixLayoutOpaque_t, decltype(&::cublasLtMatrixLayoutDestroy)>;
  std::unique_ptr<cublasLtMatmulDescOpaque_t, decltype(&::cublasLtMatmulDescDestroy)> description;
  Layout a, b, c;  // ours: cuBLASLt's B is our a
  struct Algorithm {
    cublasLtMatmulAlgo_t algo = {};
    bool launched = false, refused = false;
  };
  std::vector<Algorithm> algorithms;  // in the heuristic's order
};

ProductPlans::ProductPlans(const CublasLt& library, std::span<std::byte> workspace)
    : library_(&library), workspace_(workspace), handle_(nullptr, library.Destroy) {}
ProductPlans::ProductPlans(ProductPlans&&) noexcept = default;
ProductPlans::~ProductPlans() = default;

absl::StatusOr<ProductPlans> ProductPlans::Create(std::span<std::byte> workspace) {
  if (reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cuBLASLt's workspace has to begin at a multiple of ", kWorkspaceAlignment, " bytes"));
  }
  GPT_ASSIGN_OR_RETURN(const CublasLt* const library, LoadCublasLt());
  ProductPlans plans(*library, workspace);
  cublasLtHandle_t handle = nullptr;
  GPT_RETURN_IF_ERROR(CublasStatus(*library, library->Create(&handle), "cublasLtCreate"));
  plans.handle_.reset(handle);
  return plans;
}

ProductPlans::Key ProductPlans::KeyOf(const Product& x) {
  return {.m = x.m,
          .n = x.n,
          .k = x.k,
          .a_stride = x.a_stride,
          .a_transposed = x.a_transposed,
          .b_transposed = x.b_transposed,
          .adds = x.added != nullptr,
          .has_bias = x.bias != nullptr,
          .inputs = x.inputs,
          .output = x.output,
          .fused = x.fused,
          .a_alignment = AlignmentOf(x.a),
          .b_alignment = AlignmentOf(x.b),
          .added_alignment = AlignmentOf(x.added),
          .c_alignment = AlignmentOf(x.c),
          .vector_alignment = AlignmentOf(x.fused == Fused::kASums ? x.a_sums : x.bias),
          .gelu_alignment = AlignmentOf(x.gelu_input)};
}

absl::StatusOr<ProductPlans::Plan*> ProductPlans::Find(const Product& product) {
  const Key key = KeyOf(product);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second.get();
  GPT_ASSIGN_OR_RETURN(std::unique_ptr<Plan> made, Make(key, product));
  return plans_.emplace(key, std::move(made)).first->second.get();
}

absl::StatusOr<int> ProductPlans::Answers(const Product& product) {
  GPT_ASSIGN_OR_RETURN(const Plan* const plan, Find(product));
  return plan == nullptr ? 0 : static_cast<int>(plan->algorithms.size());
}

absl::StatusOr<bool> ProductPlans::TryRun(cudaStream_t stream, const Product& x, int answer) {
  GPT_ASSIGN_OR_RETURN(Plan* const plan, Find(x));
  if (plan == nullptr) return false;
  const size_t count = plan->algorithms.size(), first = static_cast<size_t>(answer);
  for (size_t i = 0; i < count; ++i) {
    Plan::Algorithm& algorithm = plan->algorithms[(first + i) % count];
    if (algorithm.refused) continue;
    const cublasStatus_t result = Launch(stream, *plan, algorithm.algo, x);
    if (!algorithm.launched && IsRefusal(result)) {
      algorithm.refused = true;
      continue;
    }
    GPT_RETURN_IF_ERROR(CublasStatus(
        *library_, result, absl::StrCat("launching a product of ", x.m, " x ", x.n, " x ", x.k)));
    algorithm.launched = true;
    return true;
  }
  return false;
}

absl::StatusOr<std::unique_ptr<ProductPlans::Plan>> ProductPlans::Make(
    const Key& key, const Product& product) const {
  // The reference of cublasLtMatmul has no 16-bit bias with 32-bit results.
  if (key.has_bias && key.output != key.inputs) return nullptr;
  const CublasLt& lt = *library_;
  auto plan = std::make_unique<Plan>(lt);
  cublasStatus_t result = CUBLAS_STATUS_SUCCESS;
  const auto check = [&](cublasStatus_t next) {
    if (result == CUBLAS_STATUS_SUCCESS) result = next;
  };
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check(lt.MatmulDescSetAttribute(plan->description.get(), attribute, &value, sizeof(value)));
  };
  const auto layout = [&](Plan::Layout& made, DType dtype, int64_t rows, int64_t columns,
                          int64_t stride) {
    cublasLtMatrixLayout_t native = nullptr;
    check(lt.MatrixLayoutCreate(&native, CudaType(dtype), static_cast<uint64_t>(columns),
                                static_cast<uint64_t>(rows), stride));
    made.reset(native);
  };

  cublasLtMatmulDesc_t description = nullptr;
  check(lt.MatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  plan->description.reset(description);
  if (result == CUBLAS_STATUS_SUCCESS) {
    set(CUBLASLT_MATMUL_DESC_TRANSA,
        static_cast<int32_t>(key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_TRANSB,
        static_cast<int32_t>(key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(EpilogueOf(key.fused, key.has_bias)));
    // The heuristic depends on their alignment.
    if (key.fused == Fused::kASums) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.a_sums);
    } else if (key.has_bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(CudaType(key.inputs)));
    }
    if (key.fused == Fused::kGelu || key.fused == Fused::kGeluBackward) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.gelu_input);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
    }
  }
  const int64_t a_columns = key.a_transposed ? key.m : key.k;
  const int64_t b_columns = key.b_transposed ? key.k : key.n;
  layout(plan->a, key.inputs, key.a_transposed ? key.k : key.m, a_columns, key.a_stride);
  layout(plan->b, key.inputs, key.b_transposed ? key.n : key.k, b_columns, b_columns);
  layout(plan->c, key.output, key.m, key.n, key.n);

  cublasLtMatmulPreference_t native = nullptr;
  check(lt.MatmulPreferenceCreate(&native));
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t,
                        decltype(&::cublasLtMatmulPreferenceDestroy)>
      preference(native, lt.MatmulPreferenceDestroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    if (native == nullptr) return;
    check(lt.MatmulPreferenceSetAttribute(native, attribute, &value, sizeof(value)));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_.size()});
  // The parts of a sum are added in order, in a separate step.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
         key.adds ? key.added_alignment : key.c_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c_alignment);
  GPT_RETURN_IF_ERROR(CublasStatus(
      lt, result, absl::StrCat("describing a product of ", key.m, " x ", key.n, " x ", key.k)));

  cublasLtMatmulHeuristicResult_t best[ProductWay::kAnswersMax] = {};
  int found = 0;
  result = lt.MatmulAlgoGetHeuristic(handle_.get(), plan->description.get(), plan->b.get(),
                                     plan->a.get(), plan->c.get(), plan->c.get(), native,
                                     ProductWay::kAnswersMax, best, &found);
  if (IsRefusal(result) || (result == CUBLAS_STATUS_SUCCESS && found == 0)) return nullptr;
  GPT_RETURN_IF_ERROR(CublasStatus(
      lt, result,
      absl::StrCat("finding an algorithm for a product of ", key.m, " x ", key.n, " x ", key.k)));
  for (int i = 0; i < found; ++i) {
    if (best[i].state == CUBLAS_STATUS_SUCCESS) plan->algorithms.push_back({.algo = best[i].algo});
  }
  return plan->algorithms.empty() ? nullptr : std::move(plan);
}

cublasStatus_t ProductPlans::Launch(cudaStream_t stream, const Plan& plan,
                                    const cublasLtMatmulAlgo_t& algorithm, const Product& x) const {
  const CublasLt& lt = *library_;
  cublasStatus_t result = CUBLAS_STATUS_SUCCESS;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* pointer) {
    if (pointer == nullptr || result != CUBLAS_STATUS_SUCCESS) return;
    result =
        lt.MatmulDescSetAttribute(plan.description.get(), attribute, &pointer, sizeof(pointer));
  };
  set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, x.fused == Fused::kASums ? x.a_sums : x.bias);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, x.gelu_input);
  const float alpha = 1, beta = x.added != nullptr ? 1 : 0;
  if (result != CUBLAS_STATUS_SUCCESS) return result;
  return lt.Matmul(handle_.get(), plan.description.get(), &alpha, x.b, plan.b.get(), x.a,
                   plan.a.get(), &beta, x.added != nullptr ? x.added : x.c, plan.c.get(), x.c,
                   plan.c.get(), &algorithm, workspace_.data(), workspace_.size(), stream);
}

}  // namespace ebb::gpt::cuda
