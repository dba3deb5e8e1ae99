// One rank's end of a communicator between processes of a host: runs its operations, each as a task
// of the stream it was enqueued on.
//
// Small operations, and those of memory that is not a device's, are staged (Conveyor). Large ones of
// buffers read the others' memory where it is, as `local` does: a meeting, a copy or reduction at
// the speed of memory, a meeting.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/node/conveyor.h"
#include "ebb/runtime/comm/node/exchange.h"
#include "ebb/runtime/comm/node/group.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class NodeCommunicator : public CommunicatorBackend {
 public:
  explicit NodeCommunicator(std::shared_ptr<NodeGroup> group);
  // Waits for what was enqueued, then leaves.
  ~NodeCommunicator() override;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Split(int colour, int key,
                                                             std::string_view name) override;
  absl::Status status() const override { return group_->status(); }
  void Abort(absl::Status why) override;
  int64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

  // For a communicator between hosts, whose part on this host it is.
  // Runs on the calling thread, in the order of calls. False: the communicator has failed.
  bool RunWait(const Collective& call, ThreadTeam& team);
  bool failed() const { return group_->failed(); }
  // As Abort, with just this Status.
  void Fail(const absl::Status& why) { group_->Fail(why); }
  absl::StatusOr<std::unique_ptr<NodeCommunicator>> SplitNode(int colour, int key,
                                                              std::string_view name);
  absl::StatusOr<std::unique_ptr<NodeCommunicator>> SplitNode(const CommunicatorOptions& options,
                                                              int colour, int key);

 private:
  void Run(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunCollective(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  // Publishes where this call's memory lies in the shared heap. False: not all of it does.
  bool ShareMemory(const Collective& call, uint64_t number);
  bool RunDirect(const Collective& call, uint64_t number, WaitPoint::Deadline deadline,
                 ThreadTeam& team);
  bool MeetInside(const Collective& call, WaitPoint::Deadline deadline);
  bool Meet(const Collective& call, uint64_t number, std::atomic<uint64_t> node::GroupSeat::*came,
            std::atomic<uint64_t>& arrivals, WaitPoint::Deadline deadline);

  const std::shared_ptr<NodeGroup> group_;
  Conveyor conveyor_;
  Transfer transfer_;
  Exchange exchange_;
  NodeGroup::Spin spin_;
  std::atomic<int64_t> bytes_moved_{0};
};

}  // namespace ebb
