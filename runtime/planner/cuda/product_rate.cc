#include <cublasLt.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/opened_library.h"
#include "ebb/runtime/planner/measure.h"

namespace ebb::planner {
namespace {

struct CublasLt : LibraryFunctions {
  using LibraryFunctions::LibraryFunctions;
  decltype(&::cublasLtCreate) Create = Find("cublasLtCreate");
  decltype(&::cublasLtDestroy) Destroy = Find("cublasLtDestroy");
  decltype(&::cublasLtGetStatusString) StatusString = Find("cublasLtGetStatusString");
  decltype(&::cublasLtMatmulDescCreate) DescCreate = Find("cublasLtMatmulDescCreate");
  decltype(&::cublasLtMatmulDescDestroy) DescDestroy = Find("cublasLtMatmulDescDestroy");
  decltype(&::cublasLtMatrixLayoutCreate) LayoutCreate = Find("cublasLtMatrixLayoutCreate");
  decltype(&::cublasLtMatrixLayoutDestroy) LayoutDestroy = Find("cublasLtMatrixLayoutDestroy");
  decltype(&::cublasLtMatmul) Matmul = Find("cublasLtMatmul");
};

// The library returns CUBLAS_VERSION.
LibraryVersion AskVersion(void* get_version) {
  const auto code =
      static_cast<int>(reinterpret_cast<decltype(&::cublasLtGetVersion)>(get_version)());
  return {code / 10000, code / 100 % 100, code % 100};
}

// c = a b, all of kSide x kSide.
class Products {
 public:
  // The size that bench/gpu_against_torch.py multiplies, too.
  static constexpr int64_t kSide = 8192;

  explicit Products(const CublasLt& library)
      : library_(library),
        handle_(nullptr, library.Destroy),
        product_(nullptr, library.DescDestroy),
        matrix_(nullptr, library.LayoutDestroy) {}

  absl::Status Prepare(const Device& device) {
    EBB_ASSIGN_OR_RETURN(matrices_, device.Allocate(3 * kBytes, "measuring products"));
    cublasLtHandle_t handle = nullptr;
    EBB_RETURN_IF_ERROR(StatusOf(library_.Create(&handle)));
    handle_.reset(handle);
    cublasLtMatmulDesc_t product = nullptr;
    EBB_RETURN_IF_ERROR(StatusOf(library_.DescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F)));
    product_.reset(product);
    cublasLtMatrixLayout_t matrix = nullptr;
    EBB_RETURN_IF_ERROR(StatusOf(library_.LayoutCreate(&matrix, CUDA_R_16BF, kSide, kSide, kSide)));
    matrix_.reset(matrix);
    return absl::OkStatus();
  }

  // Without an algorithm, the library takes the one that its heuristic names first.
  absl::Status Enqueue(const Stream& stream) {
    const float one = 1, zero = 0;
    std::byte* const a = matrices_.data();
    std::byte* const c = a + 2 * kBytes;
    return StatusOf(library_.Matmul(handle_.get(), product_.get(), &one, a, matrix_.get(),
                                    a + kBytes, matrix_.get(), &zero, c, matrix_.get(), c,
                                    matrix_.get(), nullptr, nullptr, 0,
                                    static_cast<cudaStream_t>(stream.view().native)));
  }

 private:
  static constexpr int64_t kBytes = 2 * kSide * kSide;

  absl::Status StatusOf(cublasStatus_t result) const {
    if (result == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
    return absl::UnimplementedError(
        absl::StrCat("cuBLASLt cannot multiply bf16: ", library_.StatusString(result)));
  }

  const CublasLt& library_;
  std::unique_ptr<cublasLtContext, decltype(&::cublasLtDestroy)> handle_;
  std::unique_ptr<cublasLtMatmulDescOpaque_t, decltype(&::cublasLtMatmulDescDestroy)> product_;
  std::unique_ptr<cublasLtMatrixLayoutOpaque_t, decltype(&::cublasLtMatrixLayoutDestroy)> matrix_;
  Buffer matrices_;
};

}  // namespace

absl::StatusOr<double> ProductRateOfGpu(const Device& device) {
  EBB_ASSIGN_OR_RETURN(
      const OpenedLibrary opened,
      OpenedLibrary::Open({.name = "cuBLASLt",
                           .file = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR),
                           .needed_for = "measurements of a GPU's products",
                           .instead = "write the rate into a file for --machine",
                           .oldest = {.major = CUBLAS_VER_MAJOR, .minor = 0, .patch = 0},
                           .version_function = "cublasLtGetVersion",
                           .version = &AskVersion}));
  const CublasLt library(opened);
  EBB_RETURN_IF_ERROR(library.found());
  Products products(library);
  EBB_RETURN_IF_ERROR(products.Prepare(device));
  Stream stream = device.CallerStream();
  constexpr int kProducts = 50;  // long enough for a GPU's limit of power
  absl::Status status;
  const double seconds = MedianSeconds([&] {
    for (int product = 0; product < kProducts; ++product) status.Update(products.Enqueue(stream));
    stream.WaitIdle();
  });
  status.Update(stream.status());
  EBB_RETURN_IF_ERROR(status);
  constexpr double kSide = Products::kSide;
  return kProducts * 2 * kSide * kSide * kSide / seconds;
}

}  // namespace ebb::planner
