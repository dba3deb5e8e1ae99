#include "ebb/runtime/comm/mpi/world.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/mpi/communicator.h"
#include "ebb/runtime/comm/mpi/mpi_world.h"
#include "ebb/runtime/comm/rendezvous/address.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// All ranks are there when they connect by TCP: a rank that has not come by then cannot.
constexpr double kConnectSeconds = 30;

// Every rank's text behind its Status; an error on one rank is one on all.
absl::StatusOr<std::vector<std::string>> Agree(MpiPort& port,
                                               const absl::StatusOr<std::string>& mine,
                                               WaitPoint::Deadline deadline) {
  EBB_ASSIGN_OR_RETURN(
      std::vector<std::string> all,
      port.AllGather(Packer().Add(PackStatus(mine.status())).Add(mine.value_or("")).Take(),
                     deadline));
  for (std::string& text : all) {
    Unpacker unpacker(text);
    EBB_RETURN_IF_ERROR(UnpackStatus(unpacker.Text()));
    text = unpacker.Text();
  }
  return all;
}

// Makes rank 0 listen: at a name of this host's where all ranks are on it, else at all of its addresses.
absl::Status Listen(RendezvousOptions& options, bool one_host, WaitPoint::Deadline deadline) {
  if (one_host) {
    options.place.name = absl::StrCat("ebb-", getuid(), "-mpi-", getpid());
    return absl::OkStatus();  // which cannot be taken
  }
  options.place.host = AddressesOfThisHost();
  EBB_ASSIGN_OR_RETURN(Descriptor listener, ebb::Listen({.host = "0.0.0.0", .port = 0, .name = ""},
                                                        /*one_host=*/false, deadline));
  options.place.port = PortOf(listener);
  options.listener = std::make_shared<Descriptor>(std::move(listener));
  return absl::OkStatus();
}

// `fits`: why this rank cannot take part.
absl::StatusOr<Rendezvous> Meet(MpiPort& port, const MpiWorldOptions& wanted,
                                const absl::Status& fits, WaitPoint::Deadline deadline) {
  RendezvousOptions options = {.rank = port.rank(),
                               .size = port.size(),
                               .launcher = wanted.launcher,
                               .timeout_seconds = std::min(wanted.timeout_seconds, kConnectSeconds),
                               .host_name = wanted.host};
  absl::StatusOr<std::string> mine = absl::UnknownError("");
  if (!fits.ok()) mine = fits;
  if (fits.ok()) mine = absl::StrCat(BootId(), " ", Myself(0, 0, "").network);
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> networks, Agree(port, mine, deadline));
  const bool one_host = std::count(networks.begin(), networks.end(), networks[0]) == port.size();
  mine = "";
  if (port.rank() == 0) {
    const absl::Status listens = Listen(options, one_host, deadline);
    mine = Packer()
               .Add(options.place.name)
               .Add(options.place.host)
               .Add(static_cast<uint64_t>(options.place.port))
               .Take();
    if (!listens.ok()) mine = listens;
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> told, Agree(port, mine, deadline));
  Unpacker unpacker(told[0]);
  options.place.name = unpacker.Text();
  options.place.host = unpacker.Text();
  options.place.port = static_cast<int>(unpacker.Number());
  return Rendezvous::Join(options);
}

// Ranks that MPI has let meet, but that share memory.
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

bool HasMpi() {
  return true;
}

absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const Launch& launch,
                                                          double timeout_seconds) {
  const WaitPoint::Deadline deadline = DeadlineAfter(timeout_seconds);
  EBB_ASSIGN_OR_RETURN(MpiLibrary * library, MpiLibrary::Get(timeout_seconds));
  const auto form = [&]() -> absl::StatusOr<std::shared_ptr<WorldBackend>> {
    EBB_ASSIGN_OR_RETURN(std::unique_ptr<MpiPort> port,
                         MpiPort::Open(*library, MPI_COMM_WORLD, deadline));
    absl::Status fits;
    if (port->rank() != launch.rank || port->size() != launch.size) {
      fits = absl::FailedPreconditionError(
          absl::StrCat(launch.launcher, " has started this process as rank ", launch.rank, " of ",
                       launch.size, ", but for MPI it is rank ", port->rank(), " of ", port->size(),
                       ": start it with the launcher of the MPI that Ebb was built with"));
    }
    const std::string launcher = absl::StrCat(launch.launcher, ", job ", launch.job);
    EBB_ASSIGN_OR_RETURN(
        Rendezvous rendezvous,
        Meet(*port, {.timeout_seconds = timeout_seconds, .launcher = launcher}, fits, deadline));
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
                         MpiWorld::Hold(std::move(port), std::move(rendezvous)));
    return std::make_shared<MpiRank>(std::move(world));
  };
  absl::StatusOr<std::shared_ptr<WorldBackend>> world = form();
  if (!world.ok()) library->WorldNotMade();
  return world;
}

absl::StatusOr<std::shared_ptr<MpiWorld>> MpiWorld::Form(const MpiWorldOptions& options) {
  const WaitPoint::Deadline deadline = DeadlineAfter(options.timeout_seconds);
  EBB_ASSIGN_OR_RETURN(MpiLibrary * library, MpiLibrary::Get(options.timeout_seconds));
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<MpiPort> port,
                       MpiPort::Open(*library, options.ranks, deadline));
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Meet(*port, options, absl::OkStatus(), deadline));
  return Hold(std::move(port), std::move(rendezvous));
}

absl::StatusOr<std::shared_ptr<MpiWorld>> MpiWorld::Hold(std::unique_ptr<MpiPort> port,
                                                         Rendezvous rendezvous) {
  std::shared_ptr<MpiWorld> world(new MpiWorld(std::move(port)));
  EBB_ASSIGN_OR_RETURN(world->store_, Store::Hold(world->rank(), std::move(rendezvous)));
  // The store may live on when the world is gone.
  world->store_->OnNote([weak = std::weak_ptr(world)](std::string_view note) {
    if (const auto alive = weak.lock()) alive->Hear(note);
  });
  world->store_->OnFailure([weak = std::weak_ptr(world)](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->FailHere(why);
  });
  return world;
}

MpiWorld::MpiWorld(std::unique_ptr<MpiPort> port) : port_(std::move(port)) {
  heard_.resize(static_cast<size_t>(size()));
  all_.name = "world";
  all_.world_ranks.resize(static_cast<size_t>(size()));
  std::iota(all_.world_ranks.begin(), all_.world_ranks.end(), 0);
  port_->library().WorldBegins();
}

MpiWorld::~MpiWorld() {
  // Also of a rank that has died since: MPI may wait for it in whatever is called next.
  port_->library().WorldEnds(!status().ok());
}

absl::Status MpiWorld::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

void MpiWorld::Fail(const absl::Status& why) {
  FailHere(why);
  store_->Break(status());
}

// Open MPI may spin in whatever is called after it could not send to a rank that has died, so it is left alone.
void MpiWorld::FailHere(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  if (!status_.ok()) return;
  status_ = why;
  port_->Abandon();
  for (const auto& [name, communicator] : communicators_) communicator->SetFailed(why);
}

void MpiWorld::Register(const std::string& name, MpiCommunicator& communicator) {
  const std::scoped_lock lock(mutex_);
  communicators_[name] = &communicator;
  if (!status_.ok()) return communicator.SetFailed(status_);
  if (const auto failed = failures_.extract(name)) communicator.SetFailed(failed.mapped());
}

void MpiWorld::Forget(const std::string& name) {
  const std::scoped_lock lock(mutex_);
  communicators_.erase(name);
}

void MpiWorld::TellFailure(const std::string& name, const absl::Status& why) {
  store_->Tell(Packer().Add(name).Add(PackStatus(why)).Add(static_cast<uint64_t>(rank())).Take());
}

bool MpiWorld::HasHeard(int rank, uint64_t told) const {
  {
    const std::scoped_lock lock(mutex_);
    if (heard_[static_cast<size_t>(rank)] >= told) return true;
  }
  return store_->HasLeft(0);  // which passes on what the others tell
}

void MpiWorld::Hear(std::string_view note) {
  Unpacker unpacker(note);
  const std::string name = unpacker.Text();
  const absl::Status why = UnpackStatus(unpacker.Text());
  const uint64_t from = unpacker.Number();
  if (!unpacker.ok() || from >= heard_.size()) return;
  const std::scoped_lock lock(mutex_);
  ++heard_[from];
  const auto found = communicators_.find(name);
  if (found != communicators_.end()) {
    found->second->SetFailed(why);
  } else {
    failures_.emplace(name, why);
  }
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiRank::NewCommunicator(
    const CommunicatorOptions& options) {
  return MpiCommunicator::Form(world_, world_->all(), {.options = options});
}

void MpiRank::Fail(absl::Status why) {
  world_->Fail(RankFailedStatus(world_->rank(), why));
}

}  // namespace ebb
