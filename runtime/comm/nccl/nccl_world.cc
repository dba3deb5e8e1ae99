#include "ebb/runtime/comm/nccl/nccl_world.h"

#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/nccl/communicator.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/registrations.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"

namespace ebb {
namespace {

// What a rank says before a communicator is made.
struct Offer {
  Proposal proposal;
  int version = 0;  // of NCCL
  ncclUniqueId id = {};
};

std::string Pack(const Offer& offer) {
  uint64_t timeout = 0;
  std::memcpy(&timeout, &offer.proposal.options.timeout_seconds, sizeof(timeout));
  return Packer()
      .Add(offer.proposal.options.name)
      .Add(static_cast<uint64_t>(static_cast<int64_t>(offer.proposal.options.reduction_group)))
      .Add(timeout)
      .Add(static_cast<uint64_t>(offer.version))
      .Add(std::string_view(offer.id.internal, sizeof(offer.id.internal)))
      .Take();
}

absl::StatusOr<Offer> Unpack(std::string_view text) {
  Unpacker unpacker(text);
  Offer offer;
  offer.proposal.options.name = unpacker.Text();
  offer.proposal.options.reduction_group = static_cast<int>(unpacker.Number());
  const uint64_t timeout = unpacker.Number();
  std::memcpy(&offer.proposal.options.timeout_seconds, &timeout, sizeof(timeout));
  offer.version = static_cast<int>(unpacker.Number());
  const std::string id = unpacker.Text();
  if (!unpacker.ok() || id.size() != sizeof(offer.id.internal))
    return absl::DataLossError("what a rank said about a new communicator cannot be read");
  std::memcpy(offer.id.internal, id.data(), id.size());
  return offer;
}

class NcclWorld : public WorldBackend {
 public:
  NcclWorld(const NcclLibrary& nccl, std::shared_ptr<Bootstrap> bootstrap, Device device)
      : nccl_(nccl),
        bootstrap_(std::move(bootstrap)),
        device_(std::move(device)),
        failure_(SharedFailure::Between(bootstrap_)) {}

  int rank() const override { return bootstrap_->rank(); }
  int size() const override { return bootstrap_->size(); }
  int local_rank() const override { return bootstrap_->local_rank(); }
  int local_size() const override { return bootstrap_->local_size(); }
  int ranks_per_host() const override { return bootstrap_->ranks_per_host(); }

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    EBB_RETURN_IF_ERROR(failure_->status());
    EBB_ASSIGN_OR_RETURN(const ncclUniqueId id, Agree(options));
    auto connected = Connect(options, id);
    // The others may be waiting for this rank inside NCCL, where only this ends it.
    if (!connected.ok()) failure_->Report(RankFailedStatus(rank(), connected.status()));
    // A communicator that one rank lacks is of no use to the others.
    const absl::Status all = AllSucceeded(connected.status(), CreationSeconds(options));
    EBB_RETURN_IF_ERROR(failure_->status());
    EBB_RETURN_IF_ERROR(all);
    return *std::move(connected);
  }

  bool connected_by_nccl() const override { return true; }

  absl::StatusOr<Buffer> Allocate(const Device& device, int64_t bytes,
                                  std::string_view what) override {
    return NcclRegistrations::Allocate(nccl_, device, bytes, what);
  }

  void Fail(absl::Status why) override { failure_->Report(RankFailedStatus(rank(), why)); }

 private:
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(const CommunicatorOptions& options,
                                                            const ncclUniqueId& id) {
    EBB_ASSIGN_OR_RETURN(std::unique_ptr<Farewells> farewells,
                         bootstrap_->NewFarewells(CreationSeconds(options)));
    return NcclCommunicator::Connect(
        {.nccl = nccl_, .device = device_, .failure = failure_, .options = options},
        std::move(farewells), id, rank(), size());
  }

  // The id of rank 0's, once all want the same.
  absl::StatusOr<ncclUniqueId> Agree(const CommunicatorOptions& options) {
    Offer mine = {.proposal = {.options = options}, .version = nccl_.version};
    absl::Status made;
    if (rank() == 0) {
      const CudaCurrent current(device_.ordinal());
      made = NcclStatus(nccl_, nccl_.GetUniqueId(&mine.id), nullptr, "ncclGetUniqueId");
    }
    const double seconds = CreationSeconds(options);
    EBB_RETURN_IF_ERROR(AllSucceeded(made, seconds));
    EBB_ASSIGN_OR_RETURN(const std::vector<std::string> texts, AllGather(Pack(mine), seconds));
    std::vector<Proposal> proposals;
    std::vector<Offer> offers;
    for (const std::string& text : texts) {
      EBB_ASSIGN_OR_RETURN(Offer offer, Unpack(text));
      proposals.push_back(offer.proposal);
      offers.push_back(std::move(offer));
    }
    for (size_t i = 1; i < offers.size(); ++i) {
      if (offers[i].version == offers[0].version) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "rank 0 has NCCL ", NcclVersionText(offers[0].version), " and rank ", i, " has ",
          NcclVersionText(offers[i].version), ": all ranks of a world need the same"));
    }
    std::vector<int> ranks(offers.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    EBB_RETURN_IF_ERROR(FormGroups(ranks, proposals).status());
    return offers[0].id;
  }

  // Ranks that cannot reach each other any more have failed for good.
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine, double seconds) {
    absl::StatusOr<std::vector<std::string>> texts = bootstrap_->AllGather(mine, seconds);
    if (texts.ok()) return texts;
    failure_->Report(texts.status());
    return failure_->status();
  }

  // On every rank the error of the first that has one.
  absl::Status AllSucceeded(const absl::Status& mine, double seconds) {
    EBB_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                         AllGather(PackStatus(mine), seconds));
    for (size_t i = 0; i < texts.size(); ++i) {
      const absl::Status status = UnpackStatus(texts[i]);
      if (!status.ok()) return RankFailedStatus(static_cast<int>(i), status);
    }
    return absl::OkStatus();
  }

  const NcclLibrary& nccl_;
  const std::shared_ptr<Bootstrap> bootstrap_;
  const Device device_;
  const std::shared_ptr<SharedFailure> failure_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> NewNcclWorld(std::shared_ptr<Bootstrap> bootstrap,
                                                           Device device) {
  EBB_ASSIGN_OR_RETURN(const NcclLibrary* const nccl, LoadNccl());
  if (device.kind() != DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL connects CUDA devices, and this rank has ", device.description()));
  }
  return std::make_shared<NcclWorld>(*nccl, std::move(bootstrap), std::move(device));
}

}  // namespace ebb
