// Ranks of a world that act together through the store: all of them, or a part. They exchange
// texts, and agree on which of them form a communicator or a smaller part.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rendezvous/store.h"

namespace ebb {

class StoreGroup {
 public:
  // All ranks, for `world_rank`, which makes one of these.
  StoreGroup(std::shared_ptr<Store> store, int world_rank);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  int world_rank() const { return world_rank_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  const std::string& name() const { return name_; }
  // Of a group that Form has made: no other group has it.
  uint64_t number() const { return number_; }
  int64_t memory() const { return memory_; }
  Store& store() const { return *store_; }
  // As WorldBackend's. A part of a world makes its calls in an order of its own.
  CallOrder* calls() const;
  void TellCalls() const { store_->TellCalls(world_rank_); }
  int local_rank() const;
  int local_size() const;
  int ranks_per_host() const;

  // The functions below are collective: all ranks call them in the same order, one thread on each
  // rank.

  // Every rank's text, by rank. Waits at most `timeout_seconds` for ranks that have not come. An
  // error on one rank is one on all ranks of the world, and names the missing one.
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine, double timeout_seconds);

  // The group that this rank forms with others that propose the same colour. Each rank offers
  // `memory`; the first rank's is the group's.
  absl::StatusOr<std::shared_ptr<StoreGroup>> Form(const Proposal& proposal, int64_t memory = 0);
  // This rank forms no more groups. Does not wait.
  void Leave();

 private:
  StoreGroup(std::shared_ptr<Store> store, int world_rank, uint64_t number, std::string name,
             std::vector<int> world_ranks);
  absl::StatusOr<Gathered> Gather(Round round, std::string_view mine);

  const std::shared_ptr<Store> store_;
  const int world_rank_;
  const uint64_t number_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const int rank_;
  int64_t memory_ = 0;
  uint64_t rounds_ = 0;
  absl::Status left_;  // why no round can be complete any more
};

}  // namespace ebb
