#include "ebb/runtime/comm/nccl/nccl_world.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/nccl/communicator.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/registrations.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/ranks_on_device.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"

namespace ebb {
namespace {

class NcclWorld : public RanksOnDevice {
 public:
  NcclWorld(const NcclLibrary& nccl, std::shared_ptr<WorldBackend> ranks,
            std::shared_ptr<StoreGroup> group, std::shared_ptr<NcclFailures> failures,
            const Device& device)
      : RanksOnDevice(std::move(ranks), device),
        nccl_(nccl),
        group_(std::move(group)),
        failures_(std::move(failures)) {}

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    EBB_RETURN_IF_ERROR(failures_->status());
    EBB_ASSIGN_OR_RETURN(Agreed agreed, Agree(options));
    auto connected = NcclCommunicator::Connect(
        {.nccl = nccl_, .device = device_, .failures = failures_, .options = options},
        std::move(agreed.name), agreed.id, rank(), size());
    // The others may be waiting for this rank inside NCCL, and only a failure ends that wait.
    if (!connected.ok()) Fail(connected.status());
    // The others cannot use a communicator that one rank lacks.
    EBB_ASSIGN_OR_RETURN(
        const std::vector<std::string> texts,
        OrFailed(group_->AllGather(PackStatus(connected.status()), CreationSeconds(options))));
    for (size_t i = 0; i < texts.size(); ++i) {
      const absl::Status status = UnpackStatus(texts[i]);
      if (status.ok()) continue;
      EBB_RETURN_IF_ERROR(failures_->status());
      return RankFailedStatus(group_->world_ranks()[i], status);
    }
    return *std::move(connected);
  }

  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override {
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> part, ranks_->Split(proposal));
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> group, part->bootstrap());
    return std::make_shared<NcclWorld>(nccl_, std::move(part), std::move(group), failures_,
                                       device_);
  }

  bool connected_by_nccl() const override { return true; }

  absl::StatusOr<Buffer> Allocate(const Device& device, int64_t bytes,
                                  std::string_view what) override {
    return NcclRegistrations::Allocate(nccl_, device, bytes, what);
  }

  void Fail(absl::Status why) override {
    failures_->Report(RankFailedStatus(group_->store().rank(), why));
  }

 private:
  // The name of a new communicator, for departure notices, and the id that its rank 0 has made.
  struct Agreed {
    std::string name;
    ncclUniqueId id = {};
  };
  absl::StatusOr<Agreed> Agree(const CommunicatorOptions& options) {
    Agreed agreed;
    absl::Status made;
    if (rank() == 0) {
      const CudaCurrent current(device_.ordinal());
      made = NcclStatus(nccl_, nccl_.GetUniqueId(&agreed.id), nullptr, "ncclGetUniqueId");
    }
    const std::string mine =
        Packer()
            .Add(PackStatus(made))
            .Add(static_cast<uint64_t>(nccl_.version))
            .Add(std::string_view(agreed.id.internal, sizeof(agreed.id.internal)))
            .Take();
    EBB_ASSIGN_OR_RETURN(const StoreGroup::Formed formed,
                         OrFailed(group_->Form({.options = options}, mine)));
    agreed.name = formed.group->name();
    int first_version = 0;
    for (size_t i = 0; i < formed.texts.size(); ++i) {
      Unpacker unpacker(formed.texts[i]);
      made = UnpackStatus(unpacker.Text());
      const int version = static_cast<int>(unpacker.Number());
      const std::string id = unpacker.Text();
      if (!unpacker.ok() || id.size() != sizeof(agreed.id.internal))
        return absl::DataLossError("what a rank said about a new communicator cannot be read");
      if (!made.ok()) return RankFailedStatus(group_->world_ranks()[i], made);
      if (i == 0) {
        first_version = version;
        std::memcpy(agreed.id.internal, id.data(), id.size());
      }
      if (version == first_version) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("rank 0 has NCCL ", NcclVersionText(first_version), " and rank ", i, " has ",
                       NcclVersionText(version), ": all ranks of a world need the same"));
    }
    return agreed;
  }

  // Ranks that cannot reach each other any more have failed for good.
  template <class T>
  absl::StatusOr<T> OrFailed(absl::StatusOr<T> result) {
    const absl::Status lost = result.status();
    if (!absl::IsDeadlineExceeded(lost) && !absl::IsUnavailable(lost)) return result;
    failures_->Report(lost);
    return failures_->status();
  }

  const NcclLibrary& nccl_;
  const std::shared_ptr<StoreGroup> group_;
  const std::shared_ptr<NcclFailures> failures_;
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
  const std::shared_ptr<NcclFailures> failures = NcclFailures::Of(group->shared_store());
  return std::make_shared<NcclWorld>(*nccl, std::move(ranks), std::move(group), failures, device);
}

}  // namespace ebb
