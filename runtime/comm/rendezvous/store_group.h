// Ranks of a world that act together through the store: all of them, or a part. They exchange
// texts, and agree on which of them form a communicator or a smaller part.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rendezvous/store.h"

namespace ebb {

class StoreGroup {
 public:
  // All ranks.
  explicit StoreGroup(std::shared_ptr<Store> store);
  // `name`: the same on its ranks, and different from that of any other group that shares ranks
  // with it.
  StoreGroup(std::shared_ptr<Store> store, std::string name, std::vector<int> world_ranks);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  std::vector<std::string> hosts() const;  // names, by rank; empty names: threads
  const std::string& name() const { return name_; }
  // Set for a group that Form has made: no other group has the same.
  uint64_t number() const { return number_; }
  Store& store() const { return *store_; }

  // The functions below are collective: all ranks call them in the same order, one thread on each
  // rank.

  // Every rank's text, by rank. Waits at most `timeout_seconds` for ranks that have not come. An
  // error on one rank is one on all ranks of the world, and names the missing one.
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine, double timeout_seconds);

  // The group that this rank forms with others that propose the same colour.
  absl::StatusOr<std::shared_ptr<StoreGroup>> Form(const Proposal& proposal);

 private:
  Store::Round NextRound();

  const std::shared_ptr<Store> store_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const int rank_;
  uint64_t number_ = 0;
  uint64_t rounds_ = 0;
};

// Ranks on several hosts. They know each other's numbers and hosts, and exchange through the store
// what GPUs need to be connected (World::On). The ranks have operations of their own only if MPI
// connects them (mpi/world.h).
class HostsRank : public WorldBackend {
 public:
  static absl::StatusOr<std::shared_ptr<WorldBackend>> Form(int rank, Rendezvous rendezvous);
  explicit HostsRank(std::shared_ptr<StoreGroup> group);

  // kUnimplemented, on every rank and at once.
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override;
  void Fail(absl::Status why) override;
  CallOrder* calls() override;
  absl::StatusOr<std::shared_ptr<StoreGroup>> bootstrap() override { return group_; }

 protected:
  const std::shared_ptr<StoreGroup> group_;
};

}  // namespace ebb
