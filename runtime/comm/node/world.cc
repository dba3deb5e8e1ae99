#include "ebb/runtime/comm/node/world.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/node/common_file.h"
#include "ebb/runtime/comm/node/communicator.h"
#include "ebb/runtime/comm/node/heaps.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/core_share.h"

namespace ebb {
namespace {

constexpr int64_t kPage = 4096;

int64_t WholePages(int64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// header | places | board seats | the board's status
struct WorldLayout {
  explicit WorldLayout(int ranks)
      : places((int64_t{sizeof(node::WorldHeader)} + 63) / 64 * 64),
        board(places + ranks * int64_t{sizeof(node::RankPlace)}),
        broken(board + ranks * int64_t{sizeof(node::BoardSeat)}),
        bytes(WholePages(broken + int64_t{sizeof(SharedStatus)})) {}
  int64_t places, board, broken, bytes;
};

absl::Status CheckOneHost(const std::vector<Participant>& participants) {
  std::set<std::string> hosts, memories;
  for (const Participant& participant : participants) {
    hosts.insert(participant.host_name);
    memories.insert(participant.shared_memory);
  }
  if (memories.size() == 1) return absl::OkStatus();
  if (hosts.size() == 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ranks on host '", *hosts.begin(),
                     "' share no /dev/shm: containers of one job need a common one"));
  }
  return CpuRanksNeedMpi(participants);
}

// How many processes have to share this one's cores.
int Sharers(const std::vector<Participant>& participants, int rank) {
  const std::string& mine = participants[static_cast<size_t>(rank)].cores;
  return static_cast<int>(
      std::count_if(participants.begin(), participants.end(), [&](const Participant& other) {
        for (size_t core = 0; core < std::min(mine.size(), other.cores.size()); ++core) {
          if (mine[core] == '1' && other.cores[core] == '1') return true;
        }
        return other.rank == rank;
      }));
}

// The same on all ranks. Two at least, so that what depends on there being several is always used.
int Lanes(const std::vector<Participant>& participants) {
  int64_t cores = node::kLanesMax;
  for (const Participant& participant : participants) {
    cores = std::min<int64_t>(cores,
                              std::count(participant.cores.begin(), participant.cores.end(), '1') /
                                  Sharers(participants, participant.rank));
  }
  return static_cast<int>(std::max<int64_t>(cores, 2));
}

std::vector<int> AllRanks(size_t size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

absl::Status FillFile(SharedFile& file, const WorldLayout& layout, int ranks) {
  EBB_RETURN_IF_ERROR(file.Reserve(0, layout.bytes));
  EBB_ASSIGN_OR_RETURN(const Mapping memory, file.Map(0, layout.bytes));
  reinterpret_cast<node::WorldHeader*>(memory.data())->next_offset.store(layout.bytes);
  for (int rank = 0; rank < ranks; ++rank) {
    std::byte* const at = memory.data() + layout.places + rank * int64_t{sizeof(node::RankPlace)};
    new (at) node::RankPlace();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<NodeWorld>> NodeWorld::Form(int rank, Rendezvous rendezvous,
                                                           Options options) {
  const std::vector<Participant>& participants = rendezvous.participants();
  std::vector<int> named_ranks = std::move(options.named_ranks);
  if (named_ranks.empty()) named_ranks = AllRanks(participants.size());
  EBB_RETURN_IF_ERROR(CheckOneHost(participants));
  const int ranks = static_cast<int>(participants.size());
  const WorldLayout layout(ranks);
  EBB_ASSIGN_OR_RETURN(SharedFile file, node::ShareFile(rank, rendezvous, [&](SharedFile& made) {
                         return FillFile(made, layout, ranks);
                       }));
  EBB_ASSIGN_OR_RETURN(Mapping mapping, file.Map(0, layout.bytes));
  EBB_ASSIGN_OR_RETURN(std::vector<Mapping> heaps, node::ShareHeaps(rank, rendezvous));
  const int named_size = std::max(options.named_size, ranks);
  std::shared_ptr<NodeWorld> world(new NodeWorld(rank, participants, std::move(named_ranks),
                                                 named_size, std::move(file), std::move(mapping),
                                                 std::move(heaps)));
  CoreShare::SetForProcess(Sharers(participants, rank));
  const auto weak = std::weak_ptr(world);
  Store::Watched watched = {.launcher = std::move(options.launcher),
                            .launcher_name = std::move(options.launcher_name),
                            .ended_in_order = [weak](int ended) {
                              const auto alive = weak.lock();
                              return alive == nullptr || alive->place(ended).ended.load() != 0;
                            }};
  EBB_ASSIGN_OR_RETURN(world->store_, Store::Hold(rank, std::move(rendezvous), std::move(watched)));
  world->store_->OnFailure([weak](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->Fail(why);
  });
  return world;
}

NodeWorld::NodeWorld(int rank, std::vector<Participant> participants, std::vector<int> named_ranks,
                     int named_size, SharedFile file, Mapping mapping, std::vector<Mapping> heaps)
    : rank_(rank),
      participants_(std::move(participants)),
      named_ranks_(std::move(named_ranks)),
      lanes_(Lanes(participants_)),
      file_(std::move(file)),
      mapping_(std::move(mapping)),
      heaps_(std::move(heaps)),
      header_(reinterpret_cast<node::WorldHeader*>(mapping_.data())),
      places_(reinterpret_cast<node::RankPlace*>(mapping_.data() + WorldLayout(size()).places)) {
  const WorldLayout layout(size());
  std::vector<CallRecord*> records(static_cast<size_t>(named_size));
  for (int i = 0; i < size(); ++i) records[static_cast<size_t>(named_rank(i))] = &place(i).calls;
  calls_ = std::make_unique<CallOrder>(named_rank(rank_), std::move(records));
  communicators_ = std::make_unique<node::Board>(
      *this, AllRanks(participants_.size()), rank_,
      reinterpret_cast<node::BoardSeat*>(mapping_.data() + layout.board),
      reinterpret_cast<SharedStatus*>(mapping_.data() + layout.broken), [this] { return status(); },
      [this](int other) { return &place(other).world; });
}

NodeWorld::~NodeWorld() {
  Leave("its process ends");
  place(rank_).ended.store(1, std::memory_order_seq_cst);
}

int64_t NodeWorld::NextOffset(int64_t bytes) {
  return header_->next_offset.fetch_add(WholePages(bytes));
}

void NodeWorld::Fail(const absl::Status& why) {
  if (!failed()) header_->failure.TrySet(why);
  // The first rank to fail it may have been killed before it has woken any.
  WakeAll();
}

std::string NodeWorld::CompareCalls(std::span<const int> named_ranks) {
  if (const absl::Status apart = calls_->Check(); !apart.ok()) Fail(apart);
  return calls_->Describe(named_ranks);
}

void NodeWorld::Leave(const std::string& how) {
  node::SayFarewell(place(rank_).world, how);
  WakeAll();
}

void NodeWorld::WakeAll() {
  for (int rank = 0; rank < size(); ++rank) {
    for (int which = 0; which < node::kWaitPoints; ++which) point(rank, which).Notify();
  }
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NodeRank::NewCommunicator(
    const CommunicatorOptions& options) {
  EBB_ASSIGN_OR_RETURN(node::Board::Place place,
                       world_->communicators().Join({.options = options}));
  return std::make_unique<NodeCommunicator>(std::make_shared<NodeGroup>(world_, std::move(place)));
}

void NodeRank::Fail(absl::Status why) {
  world_->Fail(RankFailedStatus(world_->rank(), why));
}

}  // namespace ebb
