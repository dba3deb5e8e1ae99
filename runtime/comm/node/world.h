// A world whose ranks are processes of this host: the memory that they share, who of them is still
// there, and which failed first.
//
// The end of a process that has not said that it leaves fails the whole world, on every rank, with
// its name and host: noticed by the store.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/node/board.h"
#include "ebb/runtime/comm/node/layout.h"
#include "ebb/runtime/comm/node/shared_file.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/store.h"

namespace ebb {

class NodeWorld {
 public:
  struct Options {
    // What messages call the ranks, if these are the ones of one host among several.
    std::vector<int> named_ranks;
    int named_size = 0;  // of the world that these are ranks of; 0: of this one
    // Its end before this world's is a failure.
    std::optional<ParentProcess> launcher;
    std::string launcher_name;
  };
  // kUnimplemented: the ranks are on several hosts, which the message names.
  static absl::StatusOr<std::shared_ptr<NodeWorld>> Form(int rank, Rendezvous rendezvous,
                                                         Options options);
  static absl::StatusOr<std::shared_ptr<NodeWorld>> Form(int rank, Rendezvous rendezvous) {
    return Form(rank, std::move(rendezvous), Options());
  }
  ~NodeWorld();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(participants_.size()); }
  int named_rank(int rank) const { return named_ranks_[static_cast<size_t>(rank)]; }
  int lanes() const { return lanes_; }
  node::Board& communicators() { return *communicators_; }
  // Of this rank, by the ranks' names.
  CallOrder& calls() { return *calls_; }
  // Fails, with all communicators, where the ranks' calls have gone apart. Else what is known of the
  // last calls of `named_ranks`.
  std::string CompareCalls(std::span<const int> named_ranks);
  SharedFile& file() { return file_; }
  // Whether large buffers of all ranks can be read by all, and where another rank's are here.
  bool shares_buffers() const { return !heaps_.empty(); }
  const std::byte* HeapOf(int rank) const { return heaps_[static_cast<size_t>(rank)].data(); }
  // Room for `bytes` in the file, which no other process uses.
  int64_t NextOffset(int64_t bytes);

  // Where `rank` sleeps; one of a few, so that not all of its waits wake for each other.
  WaitPoint& point(int rank, int which) {
    return place(rank).points[static_cast<size_t>(which)].wait;
  }
  node::RankPlace& place(int rank) { return places_[rank]; }

  bool failed() const { return header_->failure.is_set(); }
  absl::Status status() const { return header_->failure.Get(); }
  // The first failure stays.
  void Fail(const absl::Status& why);
  // This rank creates no more communicators.
  void Leave(const std::string& how);

 private:
  NodeWorld(int rank, std::vector<Participant> participants, std::vector<int> named_ranks,
            int named_size, SharedFile file, Mapping mapping, std::vector<Mapping> heaps);
  void WakeAll();

  const int rank_;
  const std::vector<Participant> participants_;
  const std::vector<int> named_ranks_;
  const int lanes_;
  SharedFile file_;
  const Mapping mapping_;
  const std::vector<Mapping> heaps_;  // by rank; none if not all could be mapped
  node::WorldHeader* const header_;
  node::RankPlace* const places_;
  std::unique_ptr<CallOrder> calls_;
  std::unique_ptr<node::Board> communicators_;
  std::shared_ptr<Store> store_;
};

// One rank's handle.
class NodeRank : public WorldBackend {
 public:
  explicit NodeRank(std::shared_ptr<NodeWorld> world) : world_(std::move(world)) {}
  // Communicators go on; new ones are not waited for.
  ~NodeRank() override { world_->Leave("its World was destroyed"); }

  int rank() const override { return world_->rank(); }
  int size() const override { return world_->size(); }
  int local_rank() const override { return world_->rank(); }
  int local_size() const override { return world_->size(); }
  int ranks_per_host() const override { return world_->size(); }
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  void Fail(absl::Status why) override;
  CallOrder* calls() override { return world_->size() > 1 ? &world_->calls() : nullptr; }

 private:
  std::shared_ptr<NodeWorld> world_;
};

}  // namespace ebb
