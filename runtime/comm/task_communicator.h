// The common part of communicators with operations that run on the CPU. Each operation is a task of
// the stream it was enqueued on, and operations run in the order of their calls, even on different
// streams. Where ranks cannot read each other's memory, operations run in steps (staged.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/staged.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class TaskCommunicator : public CommunicatorBackend {
 public:
  int rank() const override { return members_.rank; }
  int size() const override { return members_.size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;

 protected:
  explicit TaskCommunicator(Members members)
      : members_(std::move(members)), inputs_(members_.world_ranks.size()) {}
  const Members& members() const { return members_; }

  virtual void Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) = 0;
  virtual bool failed() = 0;
  virtual void Fail(const absl::Status& why) = 0;
  // The destructor of a derived class calls it first.
  void AwaitAllEnded();

  // Call it once all ranks have made the same call. False, as below: the communicator has failed.
  bool RunStaged(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  virtual int64_t slot_bytes(bool same_for_all) const = 0;
  virtual bool RunSteps(const StagedMovement& movement, WaitPoint::Deadline deadline) = 0;

 private:
  struct Ended {
    std::atomic<uint64_t> count{0};
    WaitPoint changed;
  };
  void RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team);

  const Members members_;
  std::vector<const void*> inputs_;  // of a staged reduction, by rank
  uint64_t taken_ = 0;
  const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();
};

}  // namespace ebb
