#include "ebb/runtime/comm/nccl/library.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

// In older versions ncclCommAbort does not wait for a launch that is under way, which then uses
// freed memory; and memory cannot be registered.
constexpr LibraryVersion kOldest = {.major = 2, .minor = 19, .patch = 0};

// `code`: NCCL_VERSION_CODE, which had one digit less before 2.9.
LibraryVersion VersionOf(int code) {
  const int major_factor = code < 10000 ? 1000 : 10000;
  return {code / major_factor, code % major_factor / 100, code % 100};
}

LibraryVersion NcclVersionOf(void* get_version) {
  int code = 0;
  reinterpret_cast<decltype(&::ncclGetVersion)>(get_version)(&code);
  return VersionOf(code);
}

}  // namespace

absl::StatusOr<NcclLibrary> OpenNccl() {
  EBB_ASSIGN_OR_RETURN(const OpenedLibrary library,
                       OpenedLibrary::Open({.name = "NCCL",
                                            .file = "libnccl.so.2",
                                            .needed_for = "ranks on GPUs",
                                            .instead = "run on the CPU (gpt: --device cpu)",
                                            .oldest = kOldest,
                                            .version_function = "ncclGetVersion",
                                            .version = &NcclVersionOf}));
  NcclLibrary nccl(library);
  EBB_RETURN_IF_ERROR(nccl.found());
  EBB_RETURN_IF_ERROR(NcclStatus(nccl, nccl.GetVersion(&nccl.version), nullptr, "ncclGetVersion"));
  return nccl;
}

namespace {

absl::StatusCode CodeOf(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
    case ncclSystemError:
      return absl::StatusCode::kUnavailable;
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

std::string_view Advice(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return "; another rank has ended or cannot be reached: look at its output";
    case ncclUnhandledCudaError:
      return "; a CUDA call inside NCCL failed: look for an earlier error of this rank";
    default:
      return "; NCCL_DEBUG=WARN in the environment makes NCCL say more";
  }
}

}  // namespace

absl::StatusOr<const NcclLibrary*> LoadNccl() {
  static const absl::StatusOr<NcclLibrary>& loaded = *new absl::StatusOr<NcclLibrary>(OpenNccl());
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

std::string NcclVersionText(int version) {
  return TextOf(VersionOf(version));
}

absl::Status NcclStatus(const NcclLibrary& nccl, ncclResult_t result, ncclComm_t comm,
                        std::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* more = comm == nullptr ? "" : nccl.GetLastError(comm);
  const bool has_more = more != nullptr && *more != '\0';
  const std::string_view advice = Advice(result);
  return absl::Status(
      CodeOf(result),
      absl::StrCat(absl::string_view(what.data(), what.size()),
                   " failed: ", nccl.GetErrorString(result), has_more ? ", " : "",
                   has_more ? more : "", absl::string_view(advice.data(), advice.size())));
}

}  // namespace ebb
