#include "ebb/runtime/comm/nccl/nccl_world.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/nccl/communicator.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/registrations.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/config/status_macros.h"

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
                                  std::string_view what) override {
    return NcclRegistrations::Allocate(nccl_, device, bytes, what);
  }

  void Fail(absl::Status why) override {
    group_->store().Fail(RankFailedStatus(group_->store().rank(), why));
  }

 private:
  const NcclLibrary& nccl_;
  const std::shared_ptr<WorldBackend> ranks_;  // the world that this one was made from
  const std::shared_ptr<StoreGroup> group_;
  const Device device_;
};

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
