#include "ops/cuda/cublaslt.h"

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

}  // namespace ebb::gpt::cuda
