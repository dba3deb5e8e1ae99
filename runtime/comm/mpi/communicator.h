// One rank's end of a communicator between hosts: runs its operations, each as a task of the stream
// it was enqueued on. All ranks first tell each other what they have called, so that a rank that is
// missing or calls something else is known by name, and nothing moves before; then elements move,
// all staged, in one level (Flat) or two (Grid).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/mpi/ferry.h"
#include "ebb/runtime/comm/mpi/flat.h"
#include "ebb/runtime/comm/mpi/grid.h"
#include "ebb/runtime/comm/mpi/group.h"
#include "ebb/runtime/comm/mpi/world.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class MpiCommunicator : public CommunicatorBackend {
 public:
  // This rank's end of the communicator that it forms with others of `parent`. If they are all on
  // this host it is one between processes that share memory.
  static absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Join(
      const std::shared_ptr<MpiWorld>& world, MpiGroup& parent, const Proposal& proposal);

  MpiCommunicator(std::shared_ptr<MpiWorld> world, MpiGroup::Place place);
  // Waits for what was enqueued, then leaves.
  ~MpiCommunicator() override;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Split(int colour, int key,
                                                             std::string_view name) override;
  absl::Status status() const override;
  void Abort(absl::Status why) override;
  int64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

 private:
  void Run(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team);
  // False: the group has failed.
  bool Meet(const Collective& call, std::span<const int> peers, WaitPoint::Deadline deadline);
  bool AllCalledTheSame(const CallSummary& mine);

  const std::shared_ptr<MpiWorld> world_;
  const std::shared_ptr<MpiGroup> group_;
  Ferry ferry_;
  Flat flat_;
  Grid grid_;
  std::atomic<int64_t> bytes_moved_{0};
};

}  // namespace ebb
