#include "ebb/runtime/comm/mpi/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/mpi/communicator.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/rendezvous/socket.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// All ranks have started when they connect by TCP, so a rank that is missing after this time has
// failed.
constexpr double kConnectSeconds = 30;

// Rank 0 listens at all addresses of its host, and MPI sends them to the others.
absl::StatusOr<Rendezvous> Meet(MpiEndpoint& endpoint, const MpiWorldOptions& wanted,
                                WaitPoint::Deadline deadline) {
  RendezvousOptions options = {.rank = endpoint.rank(),
                               .size = endpoint.size(),
                               .launcher = wanted.launcher,
                               .timeout_seconds = std::min(wanted.timeout_seconds, kConnectSeconds),
                               .host_name = wanted.host};
  absl::Status listens;
  if (endpoint.rank() == 0) {
    absl::StatusOr<Descriptor> listener =
        Listen({.host = "0.0.0.0", .port = 0, .name = ""}, /*one_host=*/false, deadline);
    listens = listener.status();
    if (listens.ok()) options.listener = std::make_shared<Descriptor>(*std::move(listener));
  }
  EBB_ASSIGN_OR_RETURN(const std::string place_of_rank_0,
                       endpoint.Broadcast(Packer()
                                              .Add(listens, AddressesOfThisHost(),
                                                   options.listener ? PortOf(*options.listener) : 0)
                                              .Take(),
                                          deadline));
  Unpacker(place_of_rank_0).Read(listens, options.place.host, options.place.port);
  EBB_RETURN_IF_ERROR(listens);
  return Rendezvous::Join(options);
}

absl::Status CheckRank(const MpiEndpoint& endpoint, const MpiWorldOptions& wanted) {
  const bool fits = wanted.rank == endpoint.rank() && wanted.size == endpoint.size();
  if (fits || wanted.rank < 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(wanted.launcher, " has started this process as rank ", wanted.rank, " of ",
                   wanted.size, ", but for MPI it is rank ", endpoint.rank(), " of ",
                   endpoint.size(), ": start it with Open MPI's launcher"));
}

absl::StatusOr<std::shared_ptr<WorldBackend>> Form(MpiLibrary& library,
                                                   const MpiWorldOptions& options) {
  const WaitPoint::Deadline deadline = DeadlineAfter(options.timeout_seconds);
  EBB_ASSIGN_OR_RETURN(
      const std::shared_ptr<MpiEndpoint> endpoint,
      MpiEndpoint::Open(
          library, options.ranks != nullptr ? options.ranks : library.mpi().comm_world, deadline));
  const bool have_met = options.met != nullptr;
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                       have_met ? std::move(*options.met) : Meet(*endpoint, options, deadline));
  const double seconds = rendezvous.timeout_seconds();
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                       Store::Hold(have_met ? options.rank : endpoint->rank(),
                                   std::move(rendezvous), options.timeout_seconds));
  if (const absl::Status fits = CheckRank(*endpoint, options); !fits.ok()) store->Fail(fits);
  const auto ranks = std::make_shared<StoreGroup>(store);
  EBB_RETURN_IF_ERROR(ranks->AllGather("", seconds).status());
  if (endpoint->rank() == 0) {
    LogInfo(absl::StrCat(endpoint->size(), " ranks, started by ", options.launcher,
                         have_met ? ", use MPI: " : ", have met through MPI: ",
                         DescribeHosts(store->participants())));
  }
  endpoint->Hold(std::move(store), options.timeout_seconds);
  return std::make_shared<MpiRank>(endpoint, ranks);
}

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const MpiWorldOptions& options) {
  EBB_ASSIGN_OR_RETURN(MpiLibrary * library, MpiLibrary::Get(options.timeout_seconds));
  absl::StatusOr<std::shared_ptr<WorldBackend>> world = Form(*library, options);
  if (!world.ok()) library->WorldNotMade();
  return world;
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiRank::NewCommunicator(
    const CommunicatorOptions& options) {
  return MpiCommunicator::Form(endpoint_, *group_, options);
}

absl::StatusOr<std::shared_ptr<WorldBackend>> MpiRank::Split(const Proposal& proposal) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> part, group_->Form(proposal));
  return std::make_shared<MpiRank>(endpoint_, std::move(part));
}

}  // namespace ebb
