#include "ebb/runtime/comm/nccl/library.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr const char* kFile = "libnccl.so.2";
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 0);  // ncclCommSplit

template <class Function>
absl::Status Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(kFile, " has no ", name, ": install NCCL ", NcclVersionText(kOldestVersion),
                   " or later, or put its folder first in LD_LIBRARY_PATH"));
}

template <class Function>
void FindOptional(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

absl::StatusOr<void*> Open() {
  if (dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) return RTLD_DEFAULT;
  void* library = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  return absl::UnavailableError(
      absl::StrCat("ranks on GPUs need NCCL, which cannot be opened: ", dlerror(), "; install ",
                   kFile, ", put its folder in LD_LIBRARY_PATH, or use --device cpu"));
}

absl::StatusOr<NcclLibrary> Load() {
  EBB_ASSIGN_OR_RETURN(void* const library, Open());
  NcclLibrary nccl;
  EBB_RETURN_IF_ERROR(Find(library, "ncclGetVersion", nccl.GetVersion));
  EBB_RETURN_IF_ERROR(Find(library, "ncclGetErrorString", nccl.GetErrorString));
  EBB_RETURN_IF_ERROR(Find(library, "ncclGetLastError", nccl.GetLastError));
  EBB_RETURN_IF_ERROR(Find(library, "ncclGetUniqueId", nccl.GetUniqueId));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommInitRankConfig", nccl.CommInitRankConfig));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommSplit", nccl.CommSplit));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommUserRank", nccl.CommUserRank));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommCount", nccl.CommCount));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommGetAsyncError", nccl.CommGetAsyncError));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommFinalize", nccl.CommFinalize));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommDestroy", nccl.CommDestroy));
  EBB_RETURN_IF_ERROR(Find(library, "ncclCommAbort", nccl.CommAbort));
  EBB_RETURN_IF_ERROR(Find(library, "ncclRedOpCreatePreMulSum", nccl.RedOpCreatePreMulSum));
  EBB_RETURN_IF_ERROR(Find(library, "ncclRedOpDestroy", nccl.RedOpDestroy));
  EBB_RETURN_IF_ERROR(Find(library, "ncclGroupStart", nccl.GroupStart));
  EBB_RETURN_IF_ERROR(Find(library, "ncclGroupEnd", nccl.GroupEnd));
  EBB_RETURN_IF_ERROR(Find(library, "ncclAllGather", nccl.AllGather));
  EBB_RETURN_IF_ERROR(Find(library, "ncclReduceScatter", nccl.ReduceScatter));
  EBB_RETURN_IF_ERROR(Find(library, "ncclAllReduce", nccl.AllReduce));
  EBB_RETURN_IF_ERROR(Find(library, "ncclBroadcast", nccl.Broadcast));
  EBB_RETURN_IF_ERROR(Find(library, "ncclSend", nccl.Send));
  EBB_RETURN_IF_ERROR(Find(library, "ncclRecv", nccl.Recv));
  FindOptional(library, "ncclMemAlloc", nccl.MemAlloc);
  FindOptional(library, "ncclMemFree", nccl.MemFree);
  FindOptional(library, "ncclCommRegister", nccl.CommRegister);
  FindOptional(library, "ncclCommDeregister", nccl.CommDeregister);
  FindOptional(library, "ncclCommWindowRegister", nccl.CommWindowRegister);
  FindOptional(library, "ncclCommWindowDeregister", nccl.CommWindowDeregister);
  EBB_RETURN_IF_ERROR(NcclStatus(nccl, nccl.GetVersion(&nccl.version), nullptr, "ncclGetVersion"));
  if (nccl.version < kOldestVersion) {
    return absl::UnavailableError(absl::StrCat("the NCCL of this machine is ",
                                               NcclVersionText(nccl.version), ", and Ebb needs ",
                                               NcclVersionText(kOldestVersion), " or later"));
  }
  return nccl;
}

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
  static const absl::StatusOr<NcclLibrary>& loaded = *new absl::StatusOr<NcclLibrary>(Load());
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

std::string NcclVersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
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
