#include "ebb/runtime/comm/mpi/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/mpi/communicator.h"
#include "ebb/runtime/comm/mpi/mpi_world.h"
#include "ebb/runtime/comm/rank_errors.h"
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
  EBB_ASSIGN_OR_RETURN(
      const std::string told,
      endpoint.Broadcast(
          Packer()
              .Add(PackStatus(listens))
              .Add(AddressesOfThisHost())
              .Add(static_cast<uint64_t>(options.listener ? PortOf(*options.listener) : 0))
              .Take(),
          deadline));
  Unpacker unpacker(told);
  EBB_RETURN_IF_ERROR(UnpackStatus(unpacker.Text()));
  options.place.host = unpacker.Text();
  options.place.port = static_cast<int>(unpacker.Number());
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Rendezvous::Join(options));
  if (!fits.ok()) {
    rendezvous.Refuse(fits);
    return fits;
  }
  EBB_RETURN_IF_ERROR(rendezvous.AllGather("").status());
  return rendezvous;
}

// Passes on another rank's note.
void PassOn(MpiCommunicator& communicator, std::string_view note) {
  Unpacker unpacker(note);
  unpacker.Text();
  unpacker.Number();
  const bool departs = unpacker.Number() > 0;
  const std::string text = unpacker.Text();
  if (!departs) return communicator.SetFailed(UnpackStatus(text));
  Unpacker departure(text);
  communicator.HearDeparture(departure);
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
    const bool share_memory = std::all_of(all.begin(), all.end(), [&](const Participant& other) {
      return other.shared_memory == all[0].shared_memory;
    });
    if (share_memory) {
      EBB_ASSIGN_OR_RETURN(std::shared_ptr<SharedWorld> world,
                           SharedWorld::Form(launch.rank, std::move(rendezvous)));
      return std::make_shared<SharedMemoryRank>(std::move(world), *library);
    }
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<MpiWorld> world,
                         MpiWorld::Hold(std::move(endpoint), std::move(rendezvous)));
    return std::make_shared<MpiRank>(std::move(world));
  };
  absl::StatusOr<std::shared_ptr<WorldBackend>> world = form();
  if (!world.ok()) library->WorldNotMade();
  return world;
}

absl::StatusOr<std::shared_ptr<MpiWorld>> MpiWorld::Form(const MpiWorldOptions& options) {
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

absl::StatusOr<std::shared_ptr<MpiWorld>> MpiWorld::Hold(std::unique_ptr<MpiEndpoint> endpoint,
                                                         Rendezvous rendezvous) {
  std::shared_ptr<MpiWorld> world(new MpiWorld(std::move(endpoint)));
  EBB_ASSIGN_OR_RETURN(world->store_, Store::Hold(world->rank(), std::move(rendezvous)));
  // The store may outlive the world.
  world->store_->OnNote([weak = std::weak_ptr(world)](std::string_view note) {
    if (const auto alive = weak.lock()) alive->Hear(note);
  });
  world->store_->OnFailure([weak = std::weak_ptr(world)](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->FailHere(why);
  });
  return world;
}

MpiWorld::MpiWorld(std::unique_ptr<MpiEndpoint> endpoint) : endpoint_(std::move(endpoint)) {
  heard_.resize(static_cast<size_t>(size()));
  endpoint_->library().WorldBegins();
}

MpiWorld::~MpiWorld() {
  // True also for a rank that has died since then: MPI may wait for it in any later call.
  endpoint_->library().WorldEnds(!status().ok());
}

absl::Status MpiWorld::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

void MpiWorld::Fail(const absl::Status& why) {
  FailHere(why);
  store_->Break(status());
}

// Once Open MPI could not send to a rank that has died, any later call may spin. So MPI is not
// called any more.
void MpiWorld::FailHere(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  if (!status_.ok()) return;
  status_ = why;
  endpoint_->Abandon();
  for (const auto& [name, known] : communicators_) {
    if (known.here != nullptr) known.here->SetFailed(why);
  }
}

void MpiWorld::Register(const std::string& name, MpiCommunicator& communicator) {
  const std::scoped_lock lock(mutex_);
  Known& known = communicators_[name];
  known.here = &communicator;
  if (!status_.ok()) communicator.SetFailed(status_);
  for (const std::string& note : std::exchange(known.early, {})) PassOn(communicator, note);
}

void MpiWorld::Forget(const std::string& name) {
  const std::scoped_lock lock(mutex_);
  const auto known = communicators_.find(name);
  if (known == communicators_.end()) return;
  known->second.here = nullptr;
  known->second.has_left = true;
}

void MpiWorld::TellFailure(const std::string& name, const absl::Status& why) {
  store_->Tell(Packer()
                   .Add(name)
                   .Add(static_cast<uint64_t>(rank()))
                   .Add(uint64_t{0})
                   .Add(PackStatus(why))
                   .Take());
}

void MpiWorld::TellDeparture(const std::string& name, int size, std::string_view departure) {
  store_->Tell(Packer()
                   .Add(name)
                   .Add(static_cast<uint64_t>(rank()))
                   .Add(static_cast<uint64_t>(size))
                   .Add(departure)
                   .Take());
  const std::scoped_lock lock(mutex_);
  Depart(name, size);
}

// Call it with mutex_ held.
void MpiWorld::Depart(const std::string& name, int size) {
  if (++communicators_[name].departed >= size) communicators_.erase(name);
}

bool MpiWorld::HasHeard(int rank, uint64_t told) const {
  {
    const std::scoped_lock lock(mutex_);
    if (heard_[static_cast<size_t>(rank)] >= told) return true;
  }
  return store_->IsAlone();
}

// A failure notice names no departing ranks.
void MpiWorld::Hear(std::string_view note) {
  Unpacker unpacker(note);
  const std::string name = unpacker.Text();
  const uint64_t from = unpacker.Number();
  const int departs_from = static_cast<int>(unpacker.Number());
  if (!unpacker.ok() || from >= heard_.size()) return;
  const std::scoped_lock lock(mutex_);
  if (departs_from == 0) ++heard_[from];
  Known& known = communicators_[name];
  if (known.here != nullptr) {
    PassOn(*known.here, note);
  } else if (!known.has_left) {
    known.early.emplace_back(note);
  }
  if (departs_from > 0) Depart(name, departs_from);
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiRank::NewCommunicator(
    const CommunicatorOptions& options) {
  return MpiCommunicator::Form(world_, *group_, {.options = options});
}

absl::StatusOr<std::shared_ptr<WorldBackend>> MpiRank::Split(const Proposal& proposal) {
  EBB_ASSIGN_OR_RETURN(StoreGroup::Formed formed, group_->Form(proposal));
  return std::make_shared<MpiRank>(world_, std::move(formed.group));
}

void MpiRank::Fail(absl::Status why) {
  world_->Fail(RankFailedStatus(world_->rank(), why));
}

}  // namespace ebb
