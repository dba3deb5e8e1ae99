#include "ops/cuda/cublaslt.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/opened_library.h"

namespace ebb::gpt::cuda {
namespace {

// It answers with CUBLAS_VERSION.
LibraryVersion AskVersion(void* get_version) {
  const auto code =
      static_cast<int>(reinterpret_cast<decltype(&::cublasLtGetVersion)>(get_version)());
  return {code / 10000, code / 100 % 100, code % 100};
}

}  // namespace

absl::StatusOr<CublasLt> OpenCublasLt() {
  EBB_ASSIGN_OR_RETURN(
      const OpenedLibrary library,
      OpenedLibrary::Open({.name = "cuBLASLt",
                           .file = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR),
                           .needed_for = "matrix products on a GPU",
                           .instead = "use --device cpu",
                           .oldest = {.major = CUBLAS_VER_MAJOR, .minor = 0, .patch = 0},
                           .version_function = "cublasLtGetVersion",
                           .version = &AskVersion}));
  CublasLt lt;
  EBB_RETURN_IF_ERROR(library.Find("cublasLtCreate", lt.Create));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtDestroy", lt.Destroy));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtGetStatusString", lt.GetStatusString));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmulDescCreate", lt.MatmulDescCreate));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmulDescDestroy", lt.MatmulDescDestroy));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmulDescSetAttribute", lt.MatmulDescSetAttribute));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatrixLayoutCreate", lt.MatrixLayoutCreate));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatrixLayoutDestroy", lt.MatrixLayoutDestroy));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmulPreferenceCreate", lt.MatmulPreferenceCreate));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmulPreferenceDestroy", lt.MatmulPreferenceDestroy));
  EBB_RETURN_IF_ERROR(
      library.Find("cublasLtMatmulPreferenceSetAttribute", lt.MatmulPreferenceSetAttribute));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmulAlgoGetHeuristic", lt.MatmulAlgoGetHeuristic));
  EBB_RETURN_IF_ERROR(library.Find("cublasLtMatmul", lt.Matmul));
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

}  // namespace ebb::gpt::cuda
