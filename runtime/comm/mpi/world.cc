#include "ebb/runtime/comm/mpi/world.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/mpi/communicator.h"
#include "ebb/runtime/comm/mpi/group.h"
#include "ebb/runtime/comm/mpi/mpi_world.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// Who ends has said it within this time, or is alone with it. Of those who have failed, others may
// have ended.
constexpr std::chrono::milliseconds kFarewell{2000}, kFarewellOfTheFailed{200};
// All ranks are there when they connect by TCP: a rank that has not come by then cannot.
constexpr double kConnectSeconds = 10;

std::vector<int> RanksOn(std::span<const int> host_of, int host) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    if (host_of[rank] == host) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace

bool HasMpi() {
  return true;
}

absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const Launch& launch,
                                                          double timeout_seconds) {
  MpiWorldOptions options;
  options.timeout_seconds = timeout_seconds;
  if (!launch.launcher_stays && launch.place.has_value()) {
    options.meeting = RendezvousOptions();
    options.meeting->place = *launch.place;
    options.meeting->launcher = absl::StrCat(launch.launcher, ", job ", launch.job);
  }
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<MpiWorld> world, MpiWorld::Form(options));
  if (world->rank() != launch.rank || world->size() != launch.size) {
    const absl::Status status = absl::FailedPreconditionError(
        absl::StrCat(launch.launcher, " has started this process as rank ", launch.rank, " of ",
                     launch.size, ", but for MPI it is rank ", world->rank(), " of ", world->size(),
                     ": start it with the launcher of the MPI that Ebb was built with"));
    world->all().Fail(status);
    return status;
  }
  if (launch.rank == 0) {
    LogInfo(absl::StrCat(launch.size, " ranks, started by ", launch.launcher,
                         ", have met through MPI: ", world->DescribeHosts()));
  }
  return std::make_shared<MpiRank>(std::move(world));
}

absl::StatusOr<std::shared_ptr<MpiWorld>> MpiWorld::Form(const MpiWorldOptions& options) {
  const WaitPoint::Deadline deadline = DeadlineAfter(options.timeout_seconds);
  EBB_ASSIGN_OR_RETURN(MpiLibrary * library, MpiLibrary::Get(options.timeout_seconds));
  absl::StatusOr<std::shared_ptr<MpiWorld>> world = FormWith(*library, options, deadline);
  if (!world.ok()) library->WorldNotMade();
  return world;
}

absl::StatusOr<std::shared_ptr<MpiWorld>> MpiWorld::FormWith(MpiLibrary& library,
                                                             const MpiWorldOptions& options,
                                                             WaitPoint::Deadline deadline) {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<MpiPort> port,
                       MpiPort::Open(library, options.ranks, deadline));
  const Participant me = Myself(port->rank(), port->size(), "MPI");
  std::random_device random;
  const std::string mine =
      Packer()
          .Add(absl::StrCat(me.shared_memory, " ", me.network, " ", options.host))
          .Add(me.host_name)
          .Add(uint64_t{random()} << 32 | random())
          .Take();
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> told, port->AllGather(mine, deadline));
  std::vector<std::string> places, names;
  std::vector<int> host_of;
  uint64_t nonce = 0;
  for (size_t rank = 0; rank < told.size(); ++rank) {
    Unpacker unpacker(told[rank]);
    const std::string place = unpacker.Text();
    names.push_back(unpacker.Text());
    const uint64_t number = unpacker.Number();
    if (!unpacker.ok()) return absl::DataLossError("an introduction that cannot be read");
    if (rank == 0) nonce = number;
    const auto found = std::find(places.begin(), places.end(), place);
    host_of.push_back(static_cast<int>(found - places.begin()));
    if (found == places.end()) places.push_back(place);
  }
  const int host = host_of[static_cast<size_t>(port->rank())];
  std::shared_ptr<MpiWorld> world(
      new MpiWorld(std::move(port), std::move(host_of), std::move(names)));
  const absl::Status formed =
      world->FormNode(absl::StrCat("ebb-", getuid(), "-mpi-", absl::Hex(nonce), "-", host),
                      options.timeout_seconds);
  // An error on one host is one on all.
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> outcomes,
                       world->port().AllGather(PackStatus(formed), deadline));
  for (const std::string& outcome : outcomes) {
    const absl::Status status = UnpackStatus(outcome);
    if (status.ok()) continue;
    if (world->all_ != nullptr) world->all_->Fail(status);
    return status;
  }
  if (options.meeting.has_value()) {
    const absl::Status watched = world->WatchOthers(*options.meeting, options.timeout_seconds);
    if (!watched.ok()) {
      world->all_->Fail(watched);
      return watched;
    }
  }
  return world;
}

MpiWorld::MpiWorld(std::unique_ptr<MpiPort> port, std::vector<int> host_of,
                   std::vector<std::string> host_names)
    : port_(std::move(port)),
      host_of_(std::move(host_of)),
      host_names_(std::move(host_names)),
      hosts_(FindHosts(host_of_)),
      heard_(new std::byte[sizeof(Notice)]()) {
  port_->library().WorldBegins();
}

absl::Status MpiWorld::FormNode(const std::string& name, double timeout_seconds) {
  const std::vector<int> ranks = RanksOn(host_of_, host_of_[static_cast<size_t>(rank())]);
  const int local = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                       Rendezvous::Join({.rank = local,
                                         .size = static_cast<int>(ranks.size()),
                                         .place = {.host = "", .port = 0, .name = name},
                                         .one_host = true,
                                         .launcher = "MPI",
                                         .timeout_seconds = timeout_seconds}));
  EBB_ASSIGN_OR_RETURN(node_, NodeWorld::Form(local, std::move(rendezvous),
                                              {.named_ranks = ranks,
                                               .named_size = size(),
                                               .launcher = std::nullopt,
                                               .launcher_name = ""}));
  MpiGroup::Place place;
  place.options.name = "world";
  place.options.timeout_seconds = timeout_seconds;
  place.rank = rank();
  for (int other = 0; other < size(); ++other) place.world_ranks.push_back(other);
  EBB_ASSIGN_OR_RETURN(node::Board::Place node,
                       node_->communicators().Join({.options = place.options}));
  place.node =
      std::make_unique<NodeCommunicator>(std::make_shared<NodeGroup>(node_, std::move(node)));
  all_ = std::make_unique<MpiGroup>(*this, std::move(place));
  Listen();
  return absl::OkStatus();
}

absl::Status MpiWorld::WatchOthers(RendezvousOptions meeting, double timeout_seconds) {
  meeting.rank = rank();
  meeting.size = size();
  meeting.timeout_seconds = std::min(timeout_seconds, kConnectSeconds);
  absl::StatusOr<Rendezvous> rendezvous = Rendezvous::Join(meeting);
  EBB_ASSIGN_OR_RETURN(
      const std::vector<std::string> outcomes,
      port_->AllGather(PackStatus(rendezvous.status()), DeadlineAfter(timeout_seconds)));
  for (const std::string& outcome : outcomes) {
    const absl::Status status = UnpackStatus(outcome);
    if (status.ok()) continue;
    // A network may let nothing but MPI through.
    if (rank() == 0) {
      LogWarning(
          absl::StrCat("ranks of other hosts will hear that a rank has died after their "
                       "time-out only, as they cannot connect by TCP: ",
                       status.message()));
    }
    return absl::OkStatus();
  }
  EBB_ASSIGN_OR_RETURN(star_, Star::Hold(rank(), *std::move(rendezvous)));
  star_->OnFailure([this](const absl::Status& why) {
    port_->Abandon();
    all_->Fail(why);
  });
  return absl::OkStatus();
}

MpiWorld::~MpiWorld() {
  if (all_ != nullptr) {
    all_->Leave("its process ends");
    Farewell();
  }
  if (star_ != nullptr) star_->Stop();
  // Also of a rank that has died since: MPI may wait for it in whatever is called next.
  const bool failed = all_ == nullptr || all_->failed();
  all_.reset();
  port_->library().WorldEnds(failed);
}

void MpiWorld::Farewell() {
  const WaitPoint::Deadline deadline =
      WaitPoint::Clock::now() + (all_->failed() ? kFarewellOfTheFailed : kFarewell);
  Patience patience;
  for (;;) {
    Poll();
    {
      const std::scoped_lock lock(telling_);
      if (told_.empty() || port_->abandoned() || WaitPoint::Clock::now() >= deadline) return;
    }
    patience.Pause();
  }
}

std::string MpiWorld::DescribeHosts() const {
  std::vector<std::string> names;
  size_t fewest = host_of_.size(), most = 0;
  for (const std::vector<int>& ranks : hosts_.ranks) {
    names.push_back(host_names_[static_cast<size_t>(ranks[0])]);
    fewest = std::min(fewest, ranks.size());
    most = std::max(most, ranks.size());
  }
  std::string text = absl::StrCat(names.size(), names.size() == 1 ? " host (" : " hosts (",
                                  absl::StrJoin(names, ", "), ") with ", fewest);
  if (most != fewest) absl::StrAppend(&text, " to ", most);
  absl::StrAppend(&text, most == 1 ? " rank each" : " ranks each");
  if (hosts_.count() > 1 && !hosts_.is_grid) {
    absl::StrAppend(&text,
                    "; collectives would send less if every host had as many ranks, "
                    "numbered host by host");
  }
  return text;
}

std::vector<int> MpiWorld::HostsOf(std::span<const int> world_ranks) const {
  std::vector<int> hosts;
  for (const int rank : world_ranks) hosts.push_back(host_of_[static_cast<size_t>(rank)]);
  return hosts;
}

void MpiWorld::Listen() {
  port_->Receive(hears_, MpiPort::kAnyRank, MpiGroup::kNoticeTag, heard_, heard_.get(),
                 sizeof(Notice));
}

void MpiWorld::Poll() {
  if (std::unique_lock lock(hearing_, std::try_to_lock); lock.owns_lock()) {
    while (hears_.Test()) {
      Notice notice;
      std::memcpy(static_cast<void*>(&notice), heard_.get(), sizeof(notice));
      const int from = hears_.source();
      Listen();
      Deliver(from, notice);
    }
  }
  if (std::unique_lock lock(telling_, std::try_to_lock); lock.owns_lock()) {
    std::erase_if(told_, [](MpiMessage& message) { return message.Test(); });
  }
  if (all_ == nullptr || all_->failed()) return;
  if (node_->failed()) all_->Fail(node_->status());
  if (port_->failed()) all_->Fail(RankFailedStatus(rank(), port_->status()));
}

void MpiWorld::Tell(int rank, const Notice& notice) {
  const MessageMemory memory(new std::byte[sizeof(Notice)]);
  std::memcpy(memory.get(), &notice, sizeof(notice));
  const std::scoped_lock lock(telling_);
  port_->Send(told_.emplace_back(), rank, MpiGroup::kNoticeTag, memory, memory.get(),
              sizeof(Notice));
}

void MpiWorld::TellCalls() {
  const std::string packed = calls().Pack();
  Notice notice = {.kind = Notice::Kind::kCalls, .bytes = packed.size()};
  std::copy_n(packed.data(), std::min(packed.size(), sizeof(notice.text)), notice.text);
  for (const std::vector<int>& ranks : hosts_.ranks) {
    if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) Tell(ranks[0], notice);
  }
}

std::string MpiWorld::CompareCalls(std::span<const int> world_ranks) {
  if (const absl::Status apart = calls().Check(); !apart.ok()) all_->Fail(apart);
  return calls().Describe(world_ranks);
}

void MpiWorld::Deliver(int from, const Notice& notice) {
  if (notice.kind == Notice::Kind::kCalls) {
    const size_t bytes = std::min<size_t>(notice.bytes, sizeof(notice.text));
    const absl::Status apart = calls().Hear(std::string_view(notice.text, bytes));
    if (!apart.ok() && all_ != nullptr) all_->Fail(apart);
    return;
  }
  {
    const std::scoped_lock lock(groups_mutex_);
    const auto found = groups_.find(notice.group);
    if (found != groups_.end()) {
      found->second->Hear(from, notice);
    } else if (notice.group > newest_) {
      early_.push_back({.from = from, .notice = notice});
    }
  }
  if (notice.group == 0 && notice.kind == Notice::Kind::kFailure) FailAllHere(all_->status());
}

void MpiWorld::Register(MpiGroup& group) {
  const std::scoped_lock lock(groups_mutex_);
  groups_[group.id()] = &group;
  newest_ = std::max(newest_, group.id());
  if (all_ != nullptr && all_->failed())
    group.Hear(rank(), Notice::Of(Notice::Kind::kFailure, group.id(), all_->status()));
  std::erase_if(early_, [&](const Early& early) {
    if (early.notice.group == group.id()) group.Hear(early.from, early.notice);
    return early.notice.group <= newest_;
  });
}

void MpiWorld::Forget(MpiGroup& group) {
  const std::scoped_lock lock(groups_mutex_);
  groups_.erase(group.id());
}

bool MpiWorld::TellStar(const absl::Status& why) {
  if (star_ == nullptr || !star_->Fail(why)) return false;
  port_->Abandon();
  return true;
}

void MpiWorld::FailAllHere(const absl::Status& why) {
  node_->Fail(why);
  const std::scoped_lock lock(groups_mutex_);
  for (const auto& [id, group] : groups_)
    group->Hear(rank(), Notice::Of(Notice::Kind::kFailure, id, why));
}

MpiRank::~MpiRank() {
  world_->all().Leave("its World was destroyed");
}

int MpiRank::ranks_per_host() const {
  return world_->hosts().is_grid ? world_->hosts().width() : world_->size();
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiRank::NewCommunicator(
    const CommunicatorOptions& options) {
  return MpiCommunicator::Join(world_, world_->all(), {.options = options});
}

// A rank that calls hears first what others have told: they wait for it.
CallOrder* MpiRank::calls() {
  if (world_->size() == 1) return nullptr;
  world_->Poll();
  return &world_->calls();
}

void MpiRank::Fail(absl::Status why) {
  world_->all().Fail(RankFailedStatus(world_->rank(), why));
}

}  // namespace ebb
