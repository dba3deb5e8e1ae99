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
#include "ebb/runtime/comm/rendezvous/hosts_rank.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/store.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/shared/group.h"
#include "ebb/runtime/comm/shared/layout.h"
#include "ebb/runtime/comm/shared/shared_file.h"

namespace ebb {

class SharedWorld : public std::enable_shared_from_this<SharedWorld> {
 public:
  // For processes that have met. kUnimplemented: the ranks are on several hosts, which the message
  // names.
  static absl::StatusOr<std::shared_ptr<SharedWorld>> Form(
      int rank, Rendezvous rendezvous, std::optional<ParentProcess> launcher = std::nullopt);
  // For threads, in `memory` (ThreadWorld).
  SharedWorld(int rank, std::shared_ptr<Store> store, std::shared_ptr<const Mapping> memory);
  ~SharedWorld();

  int rank() const { return rank_; }
  int size() const { return store_->size(); }
  bool is_threads() const { return !file_.has_value(); }
  const SharedFile& file() const { return *file_; }
  // All ranks, which form communicators.
  const std::shared_ptr<StoreGroup>& all() const { return all_; }
  Store& store() const { return *store_; }
  // Fails, with all communicators, if the ranks' calls differ. Otherwise returns what `ranks` have
  // called last.
  std::string CompareCalls(std::span<const int> ranks);

  // A place for memory that all ranks can reach, filled with zeros. Any rank may map it, which
  // allocates pages that are not there yet.
  int64_t Reserve(int64_t bytes);
  absl::StatusOr<Mapping> Map(int64_t offset, int64_t bytes);
  void Release(int64_t offset, int64_t bytes);
  // Whether processes can read the large buffers of all others; and the distance from an address
  // that `rank` has published to its place here.
  bool shares_buffers() const { return is_threads() || !peer_memory_.empty(); }
  uintptr_t BaseOf(int rank) const {
    return is_threads()
               ? 0
               : reinterpret_cast<uintptr_t>(peer_memory_[static_cast<size_t>(rank)].data());
  }

  // Of the group with this number.
  WaitPoint& point(uint64_t number) const {
    auto* const points = reinterpret_cast<shared::Point*>(memory_->data() + layout_.points);
    return points[number % shared::kWaitPoints].wait;
  }
  shared::RankPlace& place(int rank) const {
    return reinterpret_cast<shared::RankPlace*>(memory_->data() + layout_.places)[rank];
  }

  bool failed() const { return header().failure.is_set(); }
  absl::Status status() const { return header().failure.Get(); }
  // This rank gives up. The first failure stays.
  void Fail(const absl::Status& why);
  // This rank makes no more calls, on any communicator.
  void Leave(const std::string& how);

  // The store's failures are this world's from now on.
  void ListenToStore();

  void Add(SharedGroup& group);
  void Remove(SharedGroup& group);

 private:
  SharedWorld(std::shared_ptr<Store> store, std::shared_ptr<StoreGroup> all, SharedFile file,
              Mapping memory, std::vector<Mapping> peer_memory);
  static absl::StatusOr<std::shared_ptr<SharedWorld>> Share(const std::shared_ptr<Store>& store,
                                                            std::shared_ptr<StoreGroup> all,
                                                            double timeout_seconds);
  void SetFailed(const absl::Status& why);
  shared::WorldHeader& header() const {
    return *reinterpret_cast<shared::WorldHeader*>(memory_->data());
  }

  const int rank_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<StoreGroup> all_;
  const shared::WorldLayout layout_;
  std::optional<SharedFile> file_;
  const std::shared_ptr<const Mapping> memory_;
  const std::vector<Mapping> peer_memory_;  // by rank; none if not all could be mapped
  std::mutex groups_mutex_;
  std::vector<SharedGroup*> groups_;
};

// What ranks that are threads share.
class ThreadWorld {
 public:
  explicit ThreadWorld(int size);
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::shared_ptr<SharedWorld>& rank(int rank) const {
    return ranks_[static_cast<size_t>(rank)];
  }

 private:
  std::vector<std::shared_ptr<SharedWorld>> ranks_;
};

// One rank's handle.
class SharedRank : public HostsRank {
 public:
  explicit SharedRank(std::shared_ptr<SharedWorld> world) : SharedRank(world, world->all()) {}
  // For a part of it.
  SharedRank(std::shared_ptr<SharedWorld> world, std::shared_ptr<StoreGroup> ranks)
      : HostsRank(std::move(ranks)), world_(std::move(world)) {}
  SharedRank(const std::shared_ptr<ThreadWorld>& threads, int rank)
      : SharedRank(threads->rank(rank)) {}
  // Communicators go on; no rank waits for new ones of this rank.
  ~SharedRank() override { group_->Leave(); }

  int local_rank() const override { return rank(); }
  int local_size() const override { return size(); }
  int ranks_per_host() const override { return size(); }
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override;
  void Fail(absl::Status why) override;
  SharedWorld* threads() override { return world_->is_threads() ? world_.get() : nullptr; }

 protected:
  const std::shared_ptr<SharedWorld> world_;
};

}  // namespace ebb
