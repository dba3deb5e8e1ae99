#include "ebb/runtime/comm/shared/world.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/shared/communicator.h"
#include "ebb/runtime/comm/shared/shared_file.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/core_share.h"

namespace ebb {
namespace {

constexpr int64_t kPage = 4096;

absl::Status CheckOneHost(const std::vector<Participant>& participants) {
  if (ShareMemory(participants)) return absl::OkStatus();
  if (FindHosts(participants).count() == 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ranks on host '", participants[0].host_name,
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

// `memory`: pages of zeros.
void MakeWorld(const Mapping& memory, int ranks, WaitPoint::Scope scope) {
  const shared::WorldLayout layout(ranks);
  reinterpret_cast<shared::WorldHeader*>(memory.data())
      ->next_offset.store(shared::GroupLayout::RoundUp(layout.bytes, kPage));
  for (int point = 0; point < shared::kWaitPoints; ++point) {
    new (memory.data() + layout.points + point * int64_t{sizeof(shared::Point)})
        shared::Point(scope);
  }
}

absl::Status FillFile(SharedFile& file, int ranks) {
  const int64_t bytes = shared::WorldLayout(ranks).bytes;
  EBB_RETURN_IF_ERROR(file.Reserve(0, bytes));
  EBB_ASSIGN_OR_RETURN(const Mapping memory, file.Map(0, bytes));
  MakeWorld(memory, ranks, WaitPoint::Scope::kProcesses);
  return absl::OkStatus();
}

Mapping NewPages(int64_t bytes) {
  void* const pages = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? Mapping()
                             : Mapping(static_cast<std::byte*>(pages), static_cast<size_t>(bytes));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedWorld>> SharedWorld::Form(
    int rank, Rendezvous rendezvous, std::optional<ParentProcess> launcher) {
  const double timeout_seconds = rendezvous.timeout_seconds();
  EBB_ASSIGN_OR_RETURN(const std::shared_ptr<Store> store,
                       Store::Hold(rank, std::move(rendezvous), std::move(launcher)));
  absl::StatusOr<std::shared_ptr<SharedWorld>> world =
      Share(store, std::make_shared<StoreGroup>(store, rank), timeout_seconds);
  if (!world.ok()) store->Break(world.status());  // the others wait for this rank
  return world;
}

absl::StatusOr<std::shared_ptr<SharedWorld>> SharedWorld::Share(const std::shared_ptr<Store>& store,
                                                                std::shared_ptr<StoreGroup> all,
                                                                double timeout_seconds) {
  EBB_RETURN_IF_ERROR(CheckOneHost(store->participants()));
  const int ranks = store->size(), rank = all->rank();
  EBB_ASSIGN_OR_RETURN(SharedFile file,
                       shared::ShareFile(*all, timeout_seconds,
                                         [&](SharedFile& made) { return FillFile(made, ranks); }));
  EBB_ASSIGN_OR_RETURN(Mapping memory, file.Map(0, shared::WorldLayout(ranks).bytes));
  EBB_ASSIGN_OR_RETURN(std::vector<Mapping> peer_memory,
                       shared::MapPeerMemory(*all, timeout_seconds));
  CoreShare::SetForProcess(Sharers(store->participants(), rank));
  std::shared_ptr<SharedWorld> world(new SharedWorld(store, std::move(all), std::move(file),
                                                     std::move(memory), std::move(peer_memory)));
  std::vector<CallRecord*> records;
  for (int other = 0; other < ranks; ++other) records.push_back(&world->place(other).calls);
  // The records are in memory that their reader owns, because the store may use them for longer
  // than the world exists.
  store->ShareMemory(
      std::shared_ptr<CallOrder>(new CallOrder(rank, std::move(records)),
                                 [memory = world->memory_](CallOrder* calls) { delete calls; }),
      [weak = std::weak_ptr(world)](int ended) {
        const auto alive = weak.lock();
        return alive == nullptr || alive->place(ended).ended.load() != 0;
      });
  world->ListenToStore();
  return world;
}

SharedWorld::SharedWorld(int rank, std::shared_ptr<Store> store,
                         std::shared_ptr<const Mapping> memory)
    : rank_(rank),
      store_(std::move(store)),
      all_(std::make_shared<StoreGroup>(store_, rank)),
      layout_(size()),
      memory_(std::move(memory)) {}

SharedWorld::SharedWorld(std::shared_ptr<Store> store, std::shared_ptr<StoreGroup> all,
                         SharedFile file, Mapping memory, std::vector<Mapping> peer_memory)
    : rank_(all->rank()),
      store_(std::move(store)),
      all_(std::move(all)),
      layout_(size()),
      file_(std::move(file)),
      memory_(std::make_shared<const Mapping>(std::move(memory))),
      peer_memory_(std::move(peer_memory)) {}

SharedWorld::~SharedWorld() {
  place(rank_).ended.store(1, std::memory_order_seq_cst);
}

int64_t SharedWorld::Reserve(int64_t bytes) {
  const int64_t whole = shared::GroupLayout::RoundUp(bytes, kPage);
  return is_threads() ? reinterpret_cast<int64_t>(NewPages(whole).Keep())
                      : header().next_offset.fetch_add(whole);
}

absl::StatusOr<Mapping> SharedWorld::Map(int64_t offset, int64_t bytes) {
  if (!is_threads()) {
    EBB_RETURN_IF_ERROR(file_->Reserve(offset, bytes));
    return file_->Map(offset, bytes);
  }
  if (offset == 0)
    return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes for a communicator"));
  return Mapping(reinterpret_cast<std::byte*>(offset), 0);
}

void SharedWorld::Release(int64_t offset, int64_t bytes) {
  const int64_t whole = shared::GroupLayout::RoundUp(bytes, kPage);
  if (!is_threads()) return file_->Release(offset, whole);
  Mapping(reinterpret_cast<std::byte*>(offset), static_cast<size_t>(whole));  // unmaps it
}

std::string SharedWorld::CompareCalls(std::span<const int> ranks) {
  const CallOrder& calls = *store_->calls(rank_);
  if (const absl::Status apart = calls.Check(); !apart.ok()) Fail(apart);
  return calls.Describe(ranks);
}

void SharedWorld::SetFailed(const absl::Status& why) {
  if (!failed()) header().failure.TrySet(why);
  // The first rank to fail it may have been killed before it woke the others.
  for (uint32_t which = 0; which < shared::kWaitPoints; ++which) point(which).Notify();
}

void SharedWorld::Fail(const absl::Status& why) {
  store_->NoteFailure(rank_);
  SetFailed(why);
  store_->Break(status());
}

void SharedWorld::ListenToStore() {
  // The store may outlive the world.
  store_->OnFailure([weak = weak_from_this()](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->SetFailed(why);
  });
}

void SharedWorld::Leave(const std::string& how) {
  {
    const std::scoped_lock lock(groups_mutex_);
    for (SharedGroup* const group : groups_) group->Leave(how);
  }
  store_->Leave(rank_, how);
}

void SharedWorld::Add(SharedGroup& group) {
  const std::scoped_lock lock(groups_mutex_);
  groups_.push_back(&group);
}

void SharedWorld::Remove(SharedGroup& group) {
  const std::scoped_lock lock(groups_mutex_);
  std::erase(groups_, &group);
}

ThreadWorld::ThreadWorld(int size) {
  const auto memory = std::make_shared<const Mapping>(NewPages(shared::WorldLayout(size).bytes));
  if (memory->data() == nullptr) throw std::bad_alloc();
  MakeWorld(*memory, size, WaitPoint::Scope::kThreads);
  const std::shared_ptr<Store> store = Store::OfThreads(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks_.push_back(std::make_shared<SharedWorld>(rank, store, memory));
    ranks_.back()->ListenToStore();
  }
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> SharedRank::NewCommunicator(
    const CommunicatorOptions& options) {
  EBB_ASSIGN_OR_RETURN(SharedGroup::Place place,
                       SharedGroup::Form(*world_, *group_, {.options = options}));
  return std::make_unique<SharedCommunicator>(world_, std::move(place));
}

absl::StatusOr<std::shared_ptr<WorldBackend>> SharedRank::Split(const Proposal& proposal) {
  EBB_RETURN_IF_ERROR(world_->status());
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> part, group_->Form(proposal));
  return std::make_shared<SharedRank>(world_, std::move(part));
}

void SharedRank::Fail(absl::Status why) {
  world_->Fail(RankFailedStatus(world_->rank(), why));
}

}  // namespace ebb
