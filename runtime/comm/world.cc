#include "ebb/runtime/comm/world.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/launch/launch.h"
#include "ebb/runtime/comm/mpi/open_mpi.h"
#include "ebb/runtime/comm/mpi/world.h"
#include "ebb/runtime/comm/nccl/nccl_world.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/shared/device_world.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// `mpi`: why this process cannot use it.
absl::Status NeedsMpi(const Launch& launch, const absl::Status& mpi) {
  return absl::UnimplementedError(absl::StrCat(
      "rank ", launch.rank, " of ", launch.size, ", on host '", HostName(), "', was started by ",
      launch.launcher, " on several hosts: ",
      mpi.ok() ? "CPU ranks on several hosts need MPI. Start them with Open MPI's mpirun or srun "
                 "--mpi=pmix, or start all ranks on one host"
               : mpi.message(),
      "; set MASTER_ADDR and MASTER_PORT if they are"));
}

}  // namespace

absl::StatusOr<World> World::FromEnvironment(const WorldOptions& options) {
  EBB_ASSIGN_OR_RETURN(const std::optional<Launch> launch, DescribeLaunch(ThisEnvironment()));
  if (!launch.has_value() || launch->size == 1) return Single();
  const bool over_mpi = launch->has_mpi && !launch->one_host;
  const absl::Status mpi = over_mpi ? LoadOpenMpi().status() : absl::OkStatus();
  MpiWorldOptions with_mpi = {.rank = launch->rank,
                              .size = launch->size,
                              .timeout_seconds = options.timeout_seconds,
                              .launcher = LauncherText(launch->launcher, launch->job)};
  const auto new_mpi_world = [&]() -> absl::StatusOr<World> {
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> backend, NewMpiWorld(with_mpi));
    return World(std::move(backend));
  };
  if (!launch->place.has_value())
    return over_mpi && mpi.ok() ? new_mpi_world() : NeedsMpi(*launch, mpi);
  // The ranks meet before MPI is initialised, because MPI_Init would wait for a rank that cannot
  // call it.
  std::optional<ParentProcess> parent;
  if (launch->launcher_outlives_ranks) parent = ParentProcess::Find(launch->launcher);
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                       Rendezvous::Join({.rank = launch->rank,
                                         .size = launch->size,
                                         .place = *launch->place,
                                         .one_host = launch->one_host,
                                         .launcher = with_mpi.launcher,
                                         .timeout_seconds = options.timeout_seconds,
                                         .without_mpi = std::string(mpi.message())}));
  if (launch->rank == 0) {
    LogInfo(absl::StrCat(launch->size, " ranks, started by ", launch->launcher, ", have met at ",
                         Describe(*launch->place)));
  }
  const std::vector<Participant>& ranks = rendezvous.participants();
  if (FindHosts(ranks).count() > 1 && !ShareMemory(ranks)) {
    const std::string missing = HostsWithoutMpi(ranks);
    if (over_mpi && missing.empty()) {
      with_mpi.met = std::make_shared<Rendezvous>(std::move(rendezvous));
      return new_mpi_world();
    }
    // Every log says it if some hosts could use MPI, because then one host lacks what the job needs.
    const bool all_lack_it = std::none_of(ranks.begin(), ranks.end(), [](const Participant& each) {
      return each.without_mpi.empty();
    });
    if (!missing.empty() && (launch->rank == 0 || !all_lack_it)) LogWarning(missing);
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> backend,
                         HostsRank::Form(launch->rank, std::move(rendezvous)));
    return World(std::move(backend));
  }
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<SharedWorld> world,
                       SharedWorld::Form(launch->rank, std::move(rendezvous), std::move(parent)));
  return World(std::make_shared<SharedRank>(std::move(world)));
}

World World::Single() {
  return World(std::make_shared<SharedRank>(SharedWorld::OfThreads(1)[0]));
}

absl::StatusOr<World> World::On(const Device& device) const {
  if (device.kind() == DeviceKind::kCpu) return *this;
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> sharing, ShareDevice(backend_, device));
  if (sharing != nullptr) return World(std::move(sharing));
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> backend, NewNcclWorld(backend_, device));
  return World(std::move(backend));
}

absl::StatusOr<World> World::Split(int colour, int key, const CommunicatorOptions& options) const {
  absl::StatusOr<World> part = Divide(colour, key, options);
  if (calls() != nullptr && part.ok()) calls()->NoteParts();
  return part;
}

absl::StatusOr<World> World::Divide(int colour, int key, const CommunicatorOptions& options) const {
  NoteCreation();
  CommunicatorOptions wanted = options;
  wanted.reduction_group = 0;  // those of the whole need not divide a part
  if (options.name == CommunicatorOptions().name) wanted.name = "part";
  absl::StatusOr<std::shared_ptr<WorldBackend>> part =
      backend_->Split({.options = std::move(wanted), .colour = colour, .key = key});
  if (calls() != nullptr && !part.ok()) calls()->NoteError(/*engine=*/-1);
  EBB_RETURN_IF_ERROR(part.status());
  return World(*std::move(part));
}

void World::NoteCreation() const {
  CallOrder* const order = calls();
  if (order == nullptr) return;
  if (absl::Status apart = order->Note({.kind = CallKind::kCommunicator}); !apart.ok())
    backend_->Fail(std::move(apart));
}

absl::StatusOr<Communicator> World::NewCommunicator(const CommunicatorOptions& options) const {
  NoteCreation();
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> made = backend_->NewCommunicator(options);
  // If a world can never have it, all of its ranks lack it alike.
  if (calls() != nullptr && !made.ok() && !absl::IsUnimplemented(made.status()))
    calls()->NoteError(/*engine=*/-1);
  EBB_RETURN_IF_ERROR(made.status());
  return Communicator(*std::move(made));
}

absl::Status World::MeetOnHost(const CommunicatorOptions& options) const {
  // No rank gets a communicator before all have come for it.
  const absl::Status met = NewCommunicator(options).status();
  return absl::IsUnimplemented(met) ? absl::OkStatus() : met;
}

}  // namespace ebb
