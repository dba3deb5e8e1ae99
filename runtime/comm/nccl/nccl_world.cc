#include "ebb/runtime/comm/nccl/nccl_world.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/nccl/communicator.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/device/cuda/context.h"

namespace ebb {
namespace {

class NcclWorld : public WorldBackend {
 public:
  NcclWorld(const NcclLibrary& nccl, std::shared_ptr<WorldBackend> ranks,
            std::shared_ptr<StoreGroup> group, const Device& device)
      : WorldBackend(ranks->me()),
        nccl_(nccl),
        ranks_(std::move(ranks)),
        group_(std::move(group)),
        device_(device) {}

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    return NcclCommunicator::Form({.nccl = nccl_, .device = device_, .options = options}, *group_);
  }

  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override {
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> part, ranks_->Split(proposal));
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> group, part->bootstrap());
    return std::make_shared<NcclWorld>(nccl_, std::move(part), std::move(group), device_);
  }

  bool connected_by_nccl() const override { return true; }

  absl::StatusOr<Buffer> Allocate(const Device& device, int64_t bytes,
                                  std::string_view what) override;

  void Fail(absl::Status why) override {
    group_->store().Fail(RankFailedStatus(me().RankName(me().rank), why));
  }

 private:
  const NcclLibrary& nccl_;
  const std::shared_ptr<WorldBackend> ranks_;  // the world that this one was made from
  const std::shared_ptr<StoreGroup> group_;
  const Device device_;
};

// Zero-filled memory that can be registered.
absl::StatusOr<Buffer> NcclWorld::Allocate(const Device& device, int64_t bytes,
                                           std::string_view what) {
  if (bytes <= 0) return device.Allocate(bytes, what);
  EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("ebb fill"));
  const CudaCurrent current(device.ordinal());
  void* data = nullptr;
  const ncclResult_t result = nccl_.MemAlloc(&data, static_cast<size_t>(bytes));
  if (result != ncclSuccess) {
    // If memory is missing, CUDA's message says more, so CUDA allocates then. Only then, because
    // freeing CUDA's memory waits for the device, and another rank may wait for this one.
    if (device.free_bytes().value_or(bytes) < bytes)
      EBB_RETURN_IF_ERROR(device.Allocate(bytes, what).status());
    const absl::Status failed = NcclStatus(nccl_, result, nullptr, "ncclMemAlloc");
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

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> NewNcclWorld(std::shared_ptr<WorldBackend> ranks,
                                                           const Device& device) {
  EBB_ASSIGN_OR_RETURN(const NcclLibrary* const nccl, LoadNccl());
  if (device.kind() != DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL connects CUDA devices, and this rank has ", device.description()));
  }
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> group, ranks->bootstrap());
  return std::make_shared<NcclWorld>(*nccl, std::move(ranks), std::move(group), device);
}

}  // namespace ebb
