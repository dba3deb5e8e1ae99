// A world whose ranks are threads of this process: its members, its communicators, and who failed
// first.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/local/formation.h"
#include "ebb/runtime/comm/local/group.h"

namespace ebb {

class LocalWorld {
 public:
  explicit LocalWorld(int size);

  int size() const { return size_; }
  Formation& communicators() { return communicators_; }
  // Of one rank; null in a world of one.
  CallOrder* calls(int rank) {
    return calls_.empty() ? nullptr : calls_[static_cast<size_t>(rank)].get();
  }
  // Fails, with all communicators, where the ranks' calls have gone apart, as `rank` has noticed. Else
  // what is known of the last calls of `others`.
  std::string CompareCalls(int rank, std::span<const int> others);

  // One group for each colour, as places of `world_ranks` in their order.
  absl::StatusOr<std::vector<Formation::Place>> FormGroups(std::span<const int> world_ranks,
                                                           std::span<const Proposal> proposals);

  // `rank` gives up: all communicators fail, and no new ones are formed.
  void Fail(int rank, const absl::Status& why);
  absl::Status status() const;  // why a rank has given up
  // `rank` calls nothing any more. Those that do not wait for it go on.
  void Leave(int rank, const std::string& how);
  // Ranks in the order in which they first failed, aborted, returned an error or, by leaving, made
  // another fail.
  void NoteFailure(int rank);
  std::vector<int> failures() const;

 private:
  std::vector<std::shared_ptr<LocalGroup>> Groups();

  const int size_;
  const std::unique_ptr<CallRecord[]> records_;    // by rank
  std::vector<std::unique_ptr<CallOrder>> calls_;  // likewise
  Formation communicators_;
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<LocalGroup>> groups_;
  std::vector<std::string> how_left_;  // by rank; empty: has not
  absl::Status status_;
  std::vector<int> failures_;
};

// One rank's handle.
class LocalRank : public WorldBackend {
 public:
  LocalRank(std::shared_ptr<LocalWorld> world, int rank) : world_(std::move(world)), rank_(rank) {}
  // Communicators go on; new ones are not waited for.
  ~LocalRank() override { world_->communicators().Leave(rank_, "its World was destroyed"); }

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  int local_rank() const override { return rank_; }
  int local_size() const override { return world_->size(); }
  int ranks_per_host() const override { return world_->size(); }
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  void Fail(absl::Status why) override { world_->Fail(rank_, why); }
  CallOrder* calls() override { return world_->calls(rank_); }
  std::shared_ptr<LocalWorld> threads() override { return world_; }

 private:
  std::shared_ptr<LocalWorld> world_;
  int rank_;
};

}  // namespace ebb
