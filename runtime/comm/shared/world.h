// One rank's view of a world of ranks that share a host's memory, threads of this process or
// processes: the memory that they share, which of them are still there, and which failed first.
//
// If a process ends without leaving first, the whole world fails on every rank. The error names
// that rank and its host.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/store.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/shared/group.h"
#include "ebb/runtime/comm/shared/layout.h"
#include "ebb/runtime/comm/shared/shared_file.h"

namespace ebb {

class SharedWorld : public std::enable_shared_from_this<SharedWorld> {
 public:
  // For threads of this process: each rank's view.
  static std::vector<std::shared_ptr<SharedWorld>> OfThreads(int size);
  // For processes of one host that have met. kFailedPrecondition: they do not share a /dev/shm.
  static absl::StatusOr<std::shared_ptr<SharedWorld>> Form(
      int rank, Rendezvous rendezvous, std::optional<ParentProcess> launcher = std::nullopt);
  // Objects that ranks share beside memory if they are threads. Only GPUs need the stores: the
  // first call makes all.
  struct Threads {
    std::mutex mutex;
    std::vector<int> failures;                   // ranks in the order in which they first failed
    std::vector<std::shared_ptr<Store>> stores;  // by rank; null if that rank has left
    std::vector<bool> has_left;
    std::vector<std::shared_ptr<CallOrder>> calls;
  };
  // The ranks' common objects: the file if they are processes, otherwise the threads.
  struct Parts {
    std::optional<SharedFile> file = std::nullopt;
    std::shared_ptr<const Mapping> memory;
    std::vector<Mapping> peer_memory = {};  // by rank; none if not all could be mapped
    std::vector<std::string> hosts = {};    // names, by rank, if they are processes
    std::shared_ptr<Threads> threads = nullptr;
  };
  SharedWorld(int rank, int size, Parts parts);
  ~SharedWorld();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_threads() const { return !file_.has_value(); }
  const SharedFile& file() const { return *file_; }
  // The group in which others are formed.
  SharedGroup& all() { return *all_; }
  CallOrder* calls() { return size_ > 1 ? calls_.get() : nullptr; }
  // Where ranks exchange what connects their GPUs.
  absl::StatusOr<std::shared_ptr<Store>> store();
  // Fails, with all communicators, if the ranks' calls differ. Otherwise returns what `ranks` have
  // called last.
  std::string CompareCalls(std::span<const int> ranks);

  // Memory that all ranks can reach, filled with zeros.
  absl::StatusOr<int64_t> Reserve(int64_t bytes);
  absl::StatusOr<Mapping> Map(int64_t offset, int64_t bytes) const;
  void Release(int64_t offset, int64_t bytes);
  // Whether processes can read the large buffers of all others; and the distance from an address
  // that `rank` has published to its place here.
  bool shares_buffers() const { return is_threads() || !peer_memory_.empty(); }
  uintptr_t BaseOf(int rank) const {
    return is_threads() ? 0 : reinterpret_cast<uintptr_t>(peer_memory_[rank].data());
  }

  WaitPoint& point(uint32_t which) const { return PointIn(*memory_, which); }
  uint32_t NextPoint() { return header().next_point.fetch_add(1) % shared::kWaitPoints; }
  shared::RankPlace& place(int rank) const {
    return reinterpret_cast<shared::RankPlace*>(memory_->data() + layout_.places)[rank];
  }

  bool failed() const { return header().failure.is_set(); }
  absl::Status status() const { return header().failure.Get(); }
  // This rank fails the world. The first failure is kept.
  void Fail(const absl::Status& why);
  // For threads: `rank` has failed, aborted, returned an error, or made another rank fail by
  // leaving.
  void NoteFailure(int rank);
  // Ranks that are threads, in the order in which they first failed.
  std::vector<int> failures() const;
  // This rank makes no more calls, on any communicator.
  void Leave(const std::string& how);

  void Add(SharedGroup& group);
  void Remove(SharedGroup& group);

 private:
  static void SetFailed(const Mapping& memory, const absl::Status& why);
  static WaitPoint& PointIn(const Mapping& memory, uint32_t which) {
    return reinterpret_cast<shared::Point*>(memory.data() + shared::kPoints)[which].wait;
  }
  void ListenTo(Store& store);
  shared::WorldHeader& header() const {
    return *reinterpret_cast<shared::WorldHeader*>(memory_->data());
  }

  const int rank_, size_;
  const shared::WorldLayout layout_;
  std::optional<SharedFile> file_;
  const std::shared_ptr<const Mapping> memory_;
  const std::vector<Mapping> peer_memory_;
  std::shared_ptr<CallOrder> calls_;
  std::mutex groups_mutex_;
  std::vector<SharedGroup*> groups_;
  std::unique_ptr<SharedGroup> all_;
  std::shared_ptr<Store> store_;  // for processes
  const std::shared_ptr<Threads> threads_;
  bool listens_ = false;  // to the store of this thread
};

// One rank's handle.
class SharedRank : public WorldBackend {
 public:
  explicit SharedRank(std::shared_ptr<SharedWorld> world)
      : WorldBackend(OnOneHost(world->rank(), world->size())),
        world_(std::move(world)),
        group_(world_->all()) {}
  // For a part of it.
  SharedRank(std::shared_ptr<SharedWorld> world, SharedGroup::Place part)
      : WorldBackend(PartOf(*world, part.members)),
        world_(std::move(world)),
        part_(std::make_unique<SharedGroup>(*world_, std::move(part))),
        group_(*part_) {}
  // Communicators go on; no rank waits for new ones of this rank.
  ~SharedRank() override { group_.Leave("its World was destroyed"); }

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override;
  void Fail(absl::Status why) override;
  CallOrder* calls() override { return part_ == nullptr ? world_->calls() : nullptr; }
  absl::StatusOr<std::shared_ptr<StoreGroup>> bootstrap() override;
  SharedGroup* threads() override { return world_->is_threads() ? &group_ : nullptr; }

 private:
  static WorldRank OnOneHost(int rank, int size) {
    return {
        .rank = rank, .size = size, .local_rank = rank, .local_size = size, .ranks_per_host = size};
  }
  static WorldRank PartOf(const SharedWorld& whole, const Members& members) {
    WorldRank me = OnOneHost(members.rank, members.size());
    me.whole_size = whole.size();
    me.world_ranks = members.world_ranks;
    return me;
  }

  const std::shared_ptr<SharedWorld> world_;
  const std::unique_ptr<SharedGroup> part_;
  SharedGroup& group_;
  std::shared_ptr<StoreGroup> bootstrap_;  // made when it is first needed
};

}  // namespace ebb
