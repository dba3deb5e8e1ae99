// One rank's end of a `local` communicator: runs its operations, each as a task of the stream it
// was enqueued on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/local/group.h"
#include "ebb/runtime/comm/local/world.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class LocalCommunicator : public CommunicatorBackend {
 public:
  LocalCommunicator(std::shared_ptr<LocalWorld> world, std::shared_ptr<LocalGroup> group, int rank);
  // Waits for what was enqueued, then leaves.
  ~LocalCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Split(int colour, int key) override;
  absl::Status status() const override { return group_->status(); }
  void Abort(absl::Status why) override;
  int64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

 private:
  void Run(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunCollective(WaitPoint::Deadline deadline, ThreadTeam& team);
  bool RunExchange(WaitPoint::Deadline deadline, ThreadTeam& team);

  const Collective& CallOf(int rank) const { return group_->seat(rank).call; }

  const std::shared_ptr<LocalWorld> world_;
  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
  Transfer transfer_;
  std::atomic<int64_t> bytes_moved_{0};
};

}  // namespace ebb
