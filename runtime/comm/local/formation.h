// Where ranks meet on the host to form new communicators: those of a world for NewCommunicator,
// those of a communicator for Split. Every rank joins the same rounds in the same order; the last
// to come forms the groups of all.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class LocalGroup;
class LocalWorld;

class Formation {
 public:
  // A seat in a new group.
  struct Place {
    std::shared_ptr<LocalGroup> group;
    int rank = 0;
  };

  Formation(LocalWorld& world, std::vector<int> world_ranks);

  // Waits for all, at most as long as the proposed options say.
  absl::StatusOr<Place> Join(int rank, Proposal proposal);
  // Rounds that are not complete, and all later ones, fail: for good, or because `rank` will not
  // come.
  void Break(const absl::Status& why);
  void Leave(int rank, const std::string& how);

 private:
  absl::Status BreakLocked(absl::Status why);
  absl::Status FailBrokenLocked();
  std::vector<int> AbsentLocked(int64_t round) const;  // as ranks of the world
  void SayWaiting(int rank, int64_t round, const CommunicatorOptions& options, double seconds);

  LocalWorld& world_;
  const std::vector<int> world_ranks_;
  std::mutex mutex_;
  WaitPoint changed_;
  std::vector<Proposal> proposals_;
  std::vector<int64_t> joined_;  // rounds, by rank
  size_t here_ = 0;              // ranks that have joined the current round
  // Of the last complete round. It stays until the next is complete, which takes everybody's having
  // seen it.
  std::atomic<int64_t> complete_{0};
  absl::StatusOr<std::vector<Place>> places_;
  std::atomic<bool> broken_{false};
  absl::Status why_broken_;
  int broken_by_ = -1;  // the rank of the world whose leaving broke it
};

}  // namespace ebb
