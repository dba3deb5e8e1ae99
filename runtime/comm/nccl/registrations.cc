#include "ebb/runtime/comm/nccl/registrations.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"

namespace ebb {
namespace {

// NCCL_WIN_COLL_SYMMETRIC, which headers before 2.27 lack.
constexpr int kSymmetric = 1;

}  // namespace

absl::StatusOr<Buffer> NcclRegistrations::Allocate(const NcclLibrary& nccl, const Device& device,
                                                   int64_t bytes, std::string_view what) {
  if (bytes <= 0) return device.Allocate(bytes, what);
  EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("ebb fill"));
  const CudaCurrent current(device.ordinal());
  void* data = nullptr;
  const ncclResult_t result = nccl.MemAlloc(&data, static_cast<size_t>(bytes));
  if (result != ncclSuccess) {
    // If memory is missing, CUDA's message says more, so CUDA allocates then. Only then, because
    // freeing CUDA's memory waits for the device, and another rank may wait for this one.
    if (device.free_bytes().value_or(bytes) < bytes)
      EBB_RETURN_IF_ERROR(device.Allocate(bytes, what).status());
    const absl::Status failed = NcclStatus(nccl, result, nullptr, "ncclMemAlloc");
    return absl::Status(failed.code(),
                        absl::StrCat("allocating ", bytes, " bytes for ",
                                     absl::string_view(what.data(), what.size()), ": ",
                                     failed.message(), "; or set ebb.register_buffers to false"));
  }
  const auto release = [](void* freed, int64_t, int ordinal) {
    const CudaCurrent owner(ordinal);
    (*LoadNccl())->MemFree(freed);
  };
  Buffer buffer(data, bytes, release, device.ordinal());
  stream.Zero(data, bytes);
  stream.WaitIdle();
  EBB_RETURN_IF_ERROR(stream.status());
  return buffer;
}

absl::Status NcclRegistrations::Add(std::span<std::byte> memory, WaitPoint::Deadline deadline) {
  Entry& entry = entries_.emplace_back();
  if (nccl_.CommWindowRegister != nullptr && nccl_.CommWindowDeregister != nullptr) {
    EBB_RETURN_IF_ERROR(channel_->Call("ncclCommWindowRegister", [&](ncclComm_t& comm) {
      return nccl_.CommWindowRegister(comm, memory.data(), memory.size(), &entry.window,
                                      kSymmetric);
    }));
    EBB_RETURN_IF_ERROR(channel_->AwaitReady(deadline));
    if (entry.window != nullptr) return absl::OkStatus();
  }
  EBB_RETURN_IF_ERROR(channel_->Call("ncclCommRegister", [&](ncclComm_t& comm) {
    return nccl_.CommRegister(comm, memory.data(), memory.size(), &entry.handle);
  }));
  EBB_RETURN_IF_ERROR(channel_->AwaitReady(deadline));
  if (entry.handle != nullptr) return absl::OkStatus();
  entries_.pop_back();
  return absl::UnimplementedError(
      absl::StrCat("NCCL ", NcclVersionText(nccl_.version),
                   " registers no memory here (NCCL_DEBUG=INFO in the environment says why)"));
}

void NcclRegistrations::RemoveAll() {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    channel_
        ->Call("deregistering",
               [&](ncclComm_t& comm) {
                 if (entry->window != nullptr)
                   return nccl_.CommWindowDeregister(comm, entry->window);
                 return entry->handle == nullptr ? ncclSuccess
                                                 : nccl_.CommDeregister(comm, entry->handle);
               })
        .IgnoreError();
  }
  // A communicator that has failed drops its registrations itself.
  if (!entries_.empty() && channel_->failed()) channel_->WaitAborted();
  entries_.clear();
}

}  // namespace ebb
