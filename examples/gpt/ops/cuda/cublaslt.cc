#include "ops/cuda/cublaslt.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::gpt::cuda {
namespace {

std::string File() {
  return absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR);
}

absl::StatusOr<void*> Open() {
  if (dlsym(RTLD_DEFAULT, "cublasLtMatmul") != nullptr) return RTLD_DEFAULT;
  void* const library = dlopen(File().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  return absl::UnavailableError(absl::StrCat(
      "matrix products on a GPU need cuBLASLt, which cannot be opened: ", dlerror(), "; install ",
      File(), ", put its folder in LD_LIBRARY_PATH, or use --device cpu"));
}

template <class Function>
absl::Status Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      File(), " has no ", name,
      ": put the folder of the CUDA toolkit that this was built with first in LD_LIBRARY_PATH"));
}

absl::StatusOr<CublasLt> Load() {
  EBB_ASSIGN_OR_RETURN(void* const library, Open());
  CublasLt lt;
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtCreate", lt.Create));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtDestroy", lt.Destroy));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtGetStatusString", lt.GetStatusString));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmulDescCreate", lt.MatmulDescCreate));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmulDescDestroy", lt.MatmulDescDestroy));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmulDescSetAttribute", lt.MatmulDescSetAttribute));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatrixLayoutCreate", lt.MatrixLayoutCreate));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatrixLayoutDestroy", lt.MatrixLayoutDestroy));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmulPreferenceCreate", lt.MatmulPreferenceCreate));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmulPreferenceDestroy", lt.MatmulPreferenceDestroy));
  EBB_RETURN_IF_ERROR(
      Find(library, "cublasLtMatmulPreferenceSetAttribute", lt.MatmulPreferenceSetAttribute));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmulAlgoGetHeuristic", lt.MatmulAlgoGetHeuristic));
  EBB_RETURN_IF_ERROR(Find(library, "cublasLtMatmul", lt.Matmul));
  return lt;
}

}  // namespace

absl::StatusOr<const CublasLt*> LoadCublasLt() {
  static const absl::StatusOr<CublasLt>& loaded = *new absl::StatusOr<CublasLt>(Load());
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
