// NCCL's functions, opened when the first communicator is made: runtime/device/opened_library.h.
#pragma once

#include <nccl.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

struct NcclLibrary {
  int version = 0;  // as NCCL_VERSION_CODE

  decltype(&::ncclGetVersion) GetVersion = nullptr;
  decltype(&::ncclGetErrorString) GetErrorString = nullptr;
  decltype(&::ncclGetLastError) GetLastError = nullptr;
  decltype(&::ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError = nullptr;
  decltype(&::ncclCommFinalize) CommFinalize = nullptr;
  decltype(&::ncclCommDestroy) CommDestroy = nullptr;
  decltype(&::ncclCommAbort) CommAbort = nullptr;
  decltype(&::ncclRedOpCreatePreMulSum) RedOpCreatePreMulSum = nullptr;
  decltype(&::ncclRedOpDestroy) RedOpDestroy = nullptr;
  decltype(&::ncclGroupStart) GroupStart = nullptr;
  decltype(&::ncclGroupEnd) GroupEnd = nullptr;
  decltype(&::ncclAllGather) AllGather = nullptr;
  decltype(&::ncclReduceScatter) ReduceScatter = nullptr;
  decltype(&::ncclAllReduce) AllReduce = nullptr;
  decltype(&::ncclBroadcast) Broadcast = nullptr;
  decltype(&::ncclSend) Send = nullptr;
  decltype(&::ncclRecv) Recv = nullptr;

  // Declared with plain types, because headers before 2.19 lack theirs.
  ncclResult_t (*MemAlloc)(void** data, size_t bytes) = nullptr;
  ncclResult_t (*MemFree)(void* data) = nullptr;
  ncclResult_t (*CommRegister)(const ncclComm_t comm, void* data, size_t bytes,
                               void** handle) = nullptr;
  ncclResult_t (*CommDeregister)(const ncclComm_t comm, void* handle) = nullptr;
  // From 2.27 on; null in older libraries. A window is a pointer of NCCL's.
  ncclResult_t (*CommWindowRegister)(ncclComm_t comm, void* data, size_t bytes, void** window,
                                     int flags) = nullptr;
  ncclResult_t (*CommWindowDeregister)(ncclComm_t comm, void* window) = nullptr;
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
