#include "ebb/runtime/comm/shared/world.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/shared/communicator.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/memory_limit.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

constexpr int64_t kPage = 4096;

// How many processes have to share this one's cores.
int Sharers(const std::vector<Participant>& participants, int rank) {
  const std::string& mine = participants[rank].cores;
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
      ->next_offset.store(RoundUp(layout.bytes, kPage));
  for (int point = 0; point < shared::kWaitPoints; ++point) {
    new (memory.data() + shared::kPoints + point * int64_t{sizeof(shared::Point)})
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

absl::Status RunRank(const std::shared_ptr<SharedWorld>& world,
                     const std::function<absl::Status(World)>& body) {
  const CoreShare share(world->size());
  const auto handle = std::make_shared<SharedRank>(world);
  absl::Status status = body(World(handle));
  if (!status.ok()) world->NoteFailure(world->rank());
  world->Leave(status.ok() ? "its thread has ended"
                           : absl::StrCat("its thread has ended with ", status.ToString()));
  return status;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedWorld>> SharedWorld::Form(
    int rank, Rendezvous rendezvous, std::optional<ParentProcess> launcher) {
  if (!ShareMemory(rendezvous.participants())) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ranks on host '", rendezvous.participants()[0].host_name,
                     "' do not share a /dev/shm: give the containers of one job a common one"));
  }
  const std::string file_name = shared::SharedFileName(rendezvous);
  const double seconds = rendezvous.timeout_seconds();
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                       Store::Hold(rank, std::move(rendezvous), seconds, std::move(launcher)));
  StoreGroup ranks(store);
  EBB_ASSIGN_OR_RETURN(SharedFile file,
                       shared::ShareFile(ranks, file_name, seconds, [&](SharedFile& made) {
                         return FillFile(made, ranks.size());
                       }));
  EBB_ASSIGN_OR_RETURN(Mapping memory, file.Map(0, shared::WorldLayout(ranks.size()).bytes));
  EBB_ASSIGN_OR_RETURN(std::vector<Mapping> peer_memory, shared::MapPeerMemory(ranks, seconds));
  CoreShare::SetForProcess(Sharers(store->participants(), rank));
  const auto world = std::make_shared<SharedWorld>(
      rank, ranks.size(),
      Parts{.file = std::move(file),
            .memory = std::make_shared<const Mapping>(std::move(memory)),
            .peer_memory = std::move(peer_memory),
            .hosts = ranks.hosts()});
  // The store's thread does not hold the world: the world's destructor says that this rank has
  // ended in order, and the process may end right after the rank has let go of its world.
  store->ShareMemory(world->calls_, [weak = std::weak_ptr(world), memory = world->memory_,
                                     places = &world->place(0)](int ended) {
    return weak.expired() || places[ended].ended.load() != 0;
  });
  world->store_ = std::move(store);
  world->ListenTo(*world->store_);
  return world;
}

SharedWorld::SharedWorld(int rank, int size, Parts parts)
    : rank_(rank),
      size_(size),
      layout_(size),
      file_(std::move(parts.file)),
      memory_(std::move(parts.memory)),
      peer_memory_(std::move(parts.peer_memory)),
      threads_(std::move(parts.threads)) {
  std::vector<CallRecord*> records;
  std::vector<RankLog*> logs;
  for (int other = 0; other < size_; ++other) {
    records.push_back(&place(other).calls);
    logs.push_back(&place(other).log);
  }
  // The records are in memory that they own, because a store may use them for longer than the world
  // exists.
  calls_ = std::shared_ptr<CallOrder>(new CallOrder(rank_, std::move(records), std::move(logs)),
                                      [memory = memory_](CallOrder* calls) { delete calls; });
  SharedGroup::Place all;
  all.members.options.name = "world";
  all.path = "ranks";  // "world" is the group that has formed it
  all.members.world_ranks.resize(static_cast<size_t>(size_));
  all.members.rank = rank_;
  all.members.hosts = std::move(parts.hosts);
  all.offset = layout_.all;
  all.layout = shared::GroupLayout(size_, /*has_slots=*/false);
  all.memory = Mapping(memory_->data() + layout_.all, 0);
  std::iota(all.members.world_ranks.begin(), all.members.world_ranks.end(), 0);
  all_ = std::make_unique<SharedGroup>(*this, std::move(all));
}

SharedWorld::~SharedWorld() {
  all_->Leave("its process ends");
  place(rank_).ended.store(1, std::memory_order_seq_cst);
}

absl::StatusOr<int64_t> SharedWorld::Reserve(int64_t bytes) {
  const int64_t whole = RoundUp(bytes, kPage);
  if (is_threads()) {
    Mapping pages = NewPages(whole);
    if (pages.data() == nullptr) {
      const std::string limit = MemoryLimitBelow(whole);
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot allocate ", whole, " bytes for a communicator",
                       limit.empty() ? "" : "; raise the limit of ", limit));
    }
    return reinterpret_cast<int64_t>(std::move(pages).Keep());
  }
  const int64_t offset = header().next_offset.fetch_add(whole);
  EBB_RETURN_IF_ERROR(file_->Reserve(offset, whole));
  return offset;
}

absl::StatusOr<Mapping> SharedWorld::Map(int64_t offset, int64_t bytes) const {
  if (is_threads()) return Mapping(reinterpret_cast<std::byte*>(offset), 0);
  return file_->Map(offset, bytes);
}

void SharedWorld::Release(int64_t offset, int64_t bytes) {
  const int64_t whole = RoundUp(bytes, kPage);
  if (!is_threads()) return file_->Release(offset, whole);
  Mapping(reinterpret_cast<std::byte*>(offset), static_cast<size_t>(whole));
}

std::string SharedWorld::CompareCalls(std::span<const int> ranks) {
  if (const absl::Status apart = calls_->Check(); !apart.ok()) Fail(apart);
  return calls_->Describe(ranks);
}

void SharedWorld::SetFailed(const Mapping& memory, const absl::Status& why) {
  SharedStatus& failure = reinterpret_cast<shared::WorldHeader*>(memory.data())->failure;
  if (!failure.is_set()) failure.TrySet(why);
  // The first rank to fail it may have been killed before it woke the others.
  for (uint32_t which = 0; which < shared::kWaitPoints; ++which) PointIn(memory, which).Notify();
}

void SharedWorld::Fail(const absl::Status& why) {
  NoteFailure(rank_);
  SetFailed(*memory_, why);
  std::shared_ptr<Store> store = store_;
  if (is_threads()) {
    const std::scoped_lock lock(threads_->mutex);
    if (!threads_->stores.empty()) store = threads_->stores[rank_];
  }
  if (store != nullptr) store->Fail(status());
}

void SharedWorld::ListenTo(Store& store) {
  // The store may outlive the world, and does not hold it, as in Form.
  store.OnFailure([weak = weak_from_this(), memory = memory_](const absl::Status& why) {
    if (!weak.expired()) SetFailed(*memory, why);
  });
}

absl::StatusOr<std::shared_ptr<Store>> SharedWorld::store() {
  if (!is_threads()) return store_;
  std::shared_ptr<Store> mine;
  std::vector<std::shared_ptr<Store>> of_ranks_that_left;  // they wait for their threads
  {
    const std::scoped_lock lock(threads_->mutex);
    std::vector<std::shared_ptr<Store>>& stores = threads_->stores;
    if (stores.empty()) {
      EBB_ASSIGN_OR_RETURN(stores, Store::OfThreads(size_, threads_->calls));
      for (size_t rank = 0; rank < stores.size(); ++rank) {
        if (threads_->has_left[rank])
          of_ranks_that_left.push_back(std::exchange(stores[rank], nullptr));
      }
    }
    mine = stores[rank_];
  }
  if (mine == nullptr) return absl::FailedPreconditionError("this rank has left its world");
  if (!std::exchange(listens_, true)) ListenTo(*mine);
  if (failed()) mine->Fail(status());
  return mine;
}

void SharedWorld::NoteFailure(int rank) {
  if (!is_threads()) return;
  const std::scoped_lock lock(threads_->mutex);
  std::vector<int>& failures = threads_->failures;
  if (std::find(failures.begin(), failures.end(), rank) == failures.end()) failures.push_back(rank);
}

void SharedWorld::Leave(const std::string& how) {
  if (is_threads()) {
    std::shared_ptr<Store> store;  // its destructor waits for its thread
    const std::scoped_lock lock(threads_->mutex);
    threads_->has_left[rank_] = true;
    if (!threads_->stores.empty()) store.swap(threads_->stores[rank_]);
  }
  const std::scoped_lock lock(groups_mutex_);
  for (SharedGroup* const group : groups_) group->Leave(how);
}

void SharedWorld::Add(SharedGroup& group) {
  const std::scoped_lock lock(groups_mutex_);
  groups_.push_back(&group);
}

void SharedWorld::Remove(SharedGroup& group) {
  const std::scoped_lock lock(groups_mutex_);
  std::erase(groups_, &group);
}

std::vector<std::shared_ptr<SharedWorld>> SharedWorld::OfThreads(int size) {
  const auto memory = std::make_shared<const Mapping>(NewPages(shared::WorldLayout(size).bytes));
  if (memory->data() == nullptr) throw std::bad_alloc();
  MakeWorld(*memory, size, WaitPoint::Scope::kThreads);
  const auto threads = std::make_shared<Threads>();
  threads->has_left.resize(static_cast<size_t>(size));
  std::vector<std::shared_ptr<SharedWorld>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(
        std::make_shared<SharedWorld>(rank, size, Parts{.memory = memory, .threads = threads}));
    threads->calls.push_back(ranks.back()->calls_);
  }
  return ranks;
}

std::vector<int> SharedWorld::failures() const {
  const std::scoped_lock lock(threads_->mutex);
  return threads_->failures;
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> SharedRank::NewCommunicator(
    const CommunicatorOptions& options) {
  EBB_ASSIGN_OR_RETURN(SharedGroup::Place place, group_.Join({.options = options}));
  return std::make_unique<SharedCommunicator>(world_, std::move(place));
}

absl::StatusOr<std::shared_ptr<WorldBackend>> SharedRank::Split(const Proposal& proposal) {
  EBB_ASSIGN_OR_RETURN(SharedGroup::Place place, group_.Join(proposal));
  return std::make_shared<SharedRank>(world_, std::move(place));
}

absl::StatusOr<std::shared_ptr<StoreGroup>> SharedRank::bootstrap() {
  if (bootstrap_ == nullptr) {
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store, world_->store());
    bootstrap_ =
        std::make_shared<StoreGroup>(std::move(store), group_.path(), group_.members().world_ranks);
  }
  return bootstrap_;
}

void SharedRank::Fail(absl::Status why) {
  world_->Fail(RankFailedStatus(me().RankName(me().rank), why));
}

absl::Status RunThreads(int ranks, std::function<absl::Status(World)> body) {
  if (ranks < 1)
    return absl::InvalidArgumentError(absl::StrCat("cannot run ", ranks, " ranks; at least 1"));
  if (body == nullptr) return absl::InvalidArgumentError("RunThreads without a function to run");
  const std::vector<std::shared_ptr<SharedWorld>> worlds = SharedWorld::OfThreads(ranks);
  std::vector<absl::Status> statuses(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::shared_ptr<SharedWorld>& world = worlds[rank];
    absl::Status& status = statuses[rank];
    try {
      threads.emplace_back([&world, &body, &status] { status = RunRank(world, body); });
    } catch (const std::system_error& error) {
      status = NoThread("cannot start a thread for this rank", error);
      world->Fail(RankFailedStatus(rank, status));
      break;
    }
    pthread_setname_np(threads.back().native_handle(), absl::StrCat("ebb-rank-", rank).c_str());
  }
  for (std::thread& thread : threads) thread.join();
  for (const int rank : worlds[0]->failures()) {
    const absl::Status& status = statuses[rank];
    if (!status.ok()) return OfRank(rank, status);
  }
  return absl::OkStatus();
}

}  // namespace ebb
