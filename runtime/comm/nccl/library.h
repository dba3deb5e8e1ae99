// NCCL's functions, opened when the first communicator is made: runtime/device/opened_library.h.
#pragma once

#include <nccl.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/opened_library.h"

namespace ebb {

struct NcclLibrary : LibraryFunctions {
  using LibraryFunctions::LibraryFunctions;
  int version = 0;  // as NCCL_VERSION_CODE

  decltype(&::ncclGetVersion) GetVersion = Find("ncclGetVersion");
  decltype(&::ncclGetErrorString) GetErrorString = Find("ncclGetErrorString");
  decltype(&::ncclGetLastError) GetLastError = Find("ncclGetLastError");
  decltype(&::ncclGetUniqueId) GetUniqueId = Find("ncclGetUniqueId");
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig = Find("ncclCommInitRankConfig");
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError = Find("ncclCommGetAsyncError");
  decltype(&::ncclCommFinalize) CommFinalize = Find("ncclCommFinalize");
  decltype(&::ncclCommDestroy) CommDestroy = Find("ncclCommDestroy");
  decltype(&::ncclCommAbort) CommAbort = Find("ncclCommAbort");
  decltype(&::ncclRedOpCreatePreMulSum) RedOpCreatePreMulSum = Find("ncclRedOpCreatePreMulSum");
  decltype(&::ncclRedOpDestroy) RedOpDestroy = Find("ncclRedOpDestroy");
  decltype(&::ncclGroupStart) GroupStart = Find("ncclGroupStart");
  decltype(&::ncclGroupEnd) GroupEnd = Find("ncclGroupEnd");
  decltype(&::ncclAllGather) AllGather = Find("ncclAllGather");
  decltype(&::ncclReduceScatter) ReduceScatter = Find("ncclReduceScatter");
  decltype(&::ncclAllReduce) AllReduce = Find("ncclAllReduce");
  decltype(&::ncclBroadcast) Broadcast = Find("ncclBroadcast");
  decltype(&::ncclSend) Send = Find("ncclSend");
  decltype(&::ncclRecv) Recv = Find("ncclRecv");

  // Declared with plain types, because headers before 2.19 lack theirs.
  ncclResult_t (*MemAlloc)(void** data, size_t bytes) = Find("ncclMemAlloc");
  ncclResult_t (*MemFree)(void* data) = Find("ncclMemFree");
  ncclResult_t (*CommRegister)(const ncclComm_t comm, void* data, size_t bytes,
                               void** handle) = Find("ncclCommRegister");
  ncclResult_t (*CommDeregister)(const ncclComm_t comm, void* handle) = Find("ncclCommDeregister");
  // From 2.27 on; null in older libraries. A window is a pointer of NCCL's.
  ncclResult_t (*CommWindowRegister)(ncclComm_t comm, void* data, size_t bytes, void** window,
                                     int flags) = FindIfThere("ncclCommWindowRegister");
  ncclResult_t (*CommWindowDeregister)(ncclComm_t comm,
                                       void* window) = FindIfThere("ncclCommWindowDeregister");
};

// kUnavailable says what is missing, or which version is too old.
absl::StatusOr<NcclLibrary> OpenNccl();
// The result of the first call, for the whole life of the process.
absl::StatusOr<const NcclLibrary*> LoadNccl();

// "2.28.9".
std::string NcclVersionText(int version);

// OK for ncclSuccess and ncclInProgress. `comm` may be null; otherwise NCCL's own text about its
// last error is added.
absl::Status NcclStatus(const NcclLibrary& nccl, ncclResult_t result, ncclComm_t comm,
                        std::string_view what);

}  // namespace ebb
