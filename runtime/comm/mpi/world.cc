#include "ebb/runtime/comm/mpi/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/mpi/communicator.h"
#include "ebb/runtime/comm/rendezvous/address.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// All ranks have started when they connect by TCP, so a rank that is missing after this time has
// failed.
constexpr double kConnectSeconds = 30;

// Rank 0 listens at all addresses of its host, and MPI sends them to the others. `fits`: why this
// rank cannot take part; every rank learns it.
absl::StatusOr<Rendezvous> Meet(MpiEndpoint& endpoint, const MpiWorldOptions& wanted,
                                const absl::Status& fits, WaitPoint::Deadline deadline) {
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
  EBB_ASSIGN_OR_RETURN(const std::string told,
                       endpoint.Broadcast(Packer()
                                              .Add(listens, AddressesOfThisHost(),
                                                   options.listener ? PortOf(*options.listener) : 0)
                                              .Take(),
                                          deadline));
  Unpacker(told).Read(listens, options.place.host, options.place.port);
  EBB_RETURN_IF_ERROR(listens);
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Rendezvous::Join(options));
  if (!fits.ok()) {
    rendezvous.Refuse(fits);
    return fits;
  }
  EBB_RETURN_IF_ERROR(rendezvous.AllGather("").status());
  return rendezvous;
}

// Ranks that have met through MPI but share memory.
class SharedMemoryRank : public SharedRank {
 public:
  SharedMemoryRank(std::shared_ptr<SharedWorld> world, MpiLibrary& library)
      : SharedRank(std::move(world)), library_(library) {
    library_.WorldBegins();
  }
  ~SharedMemoryRank() override { library_.WorldEnds(!world_->status().ok()); }

 private:
  MpiLibrary& library_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const Launch& launch,
                                                          double timeout_seconds) {
  const WaitPoint::Deadline deadline = DeadlineAfter(timeout_seconds);
  EBB_ASSIGN_OR_RETURN(MpiLibrary * library, MpiLibrary::Get(timeout_seconds));
  const auto form = [&]() -> absl::StatusOr<std::shared_ptr<WorldBackend>> {
    EBB_ASSIGN_OR_RETURN(std::unique_ptr<MpiEndpoint> endpoint,
                         MpiEndpoint::Open(*library, library->mpi().comm_world, deadline));
    absl::Status fits;
    if (endpoint->rank() != launch.rank || endpoint->size() != launch.size) {
      fits = absl::FailedPreconditionError(
          absl::StrCat(launch.launcher, " has started this process as rank ", launch.rank, " of ",
                       launch.size, ", but for MPI it is rank ", endpoint->rank(), " of ",
                       endpoint->size(), ": start it with Open MPI's launcher"));
    }
    const std::string launcher = absl::StrCat(launch.launcher, ", job ", launch.job);
    EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                         Meet(*endpoint, {.timeout_seconds = timeout_seconds, .launcher = launcher},
                              fits, deadline));
    const std::vector<Participant>& all = rendezvous.participants();
    if (launch.rank == 0) {
      LogInfo(absl::StrCat(launch.size, " ranks, started by ", launch.launcher,
                           ", have met through MPI: ", DescribeHosts(all)));
    }
    if (ShareMemory(all)) {
      EBB_ASSIGN_OR_RETURN(std::shared_ptr<SharedWorld> world,
                           SharedWorld::Form(launch.rank, std::move(rendezvous)));
      return std::make_shared<SharedMemoryRank>(std::move(world), *library);
    }
    return MpiRank::Hold(std::move(endpoint), std::move(rendezvous));
  };
  absl::StatusOr<std::shared_ptr<WorldBackend>> world = form();
  if (!world.ok()) library->WorldNotMade();
  return world;
}

absl::StatusOr<std::shared_ptr<WorldBackend>> MpiRank::Form(const MpiWorldOptions& options) {
  const WaitPoint::Deadline deadline = DeadlineAfter(options.timeout_seconds);
  EBB_ASSIGN_OR_RETURN(MpiLibrary * library, MpiLibrary::Get(options.timeout_seconds));
  EBB_ASSIGN_OR_RETURN(
      std::unique_ptr<MpiEndpoint> endpoint,
      MpiEndpoint::Open(*library,
                        options.ranks != nullptr ? options.ranks : library->mpi().comm_world,
                        deadline));
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Meet(*endpoint, options, absl::OkStatus(), deadline));
  return Hold(std::move(endpoint), std::move(rendezvous));
}

absl::StatusOr<std::shared_ptr<WorldBackend>> MpiRank::Hold(std::shared_ptr<MpiEndpoint> endpoint,
                                                            Rendezvous rendezvous) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                       Store::Hold(endpoint->rank(), std::move(rendezvous)));
  endpoint->Hold(store);
  return std::make_shared<MpiRank>(std::move(endpoint),
                                   std::make_shared<StoreGroup>(std::move(store)));
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
