// The common part of communicators with operations that run on the CPU. Each operation is a task of
// the stream it was enqueued on, and operations run in the order of their calls, even on different
// streams.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/movement.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// Operations on memory that other ranks cannot read run in steps. In each step every rank puts what
// each other rank needs, unreduced, into slots, and takes what the others have put there for it.
// Ranks of a host read a slot in place (shared/communicator.h), others get a message
// (mpi/communicator.h). Sums have the order of communicator.h for any size of step, because a
// step's inputs are read at once.
//
// Ranks that see the same call have the same steps.
class StagedMovement {
 public:
  // Where this rank finds what `peer` has sent it in a step.
  using Received = absl::FunctionRef<const std::byte*(int peer, int64_t step)>;

  StagedMovement(const Movement& movement, int64_t slot_bytes, Transfer& transfer, ThreadTeam& team)
      : movement_(movement),
        flat_(movement.flat),
        per_step_(slot_bytes / flat_.element_bytes()),
        transfer_(transfer),
        team_(team) {}

  const Collective& call() const { return movement_.call; }
  // One slot is filled for all.
  bool same_for_all() const { return movement_.same_for_all(); }
  int64_t steps() const { return (movement_.elements_max() + per_step_ - 1) / per_step_; }
  // At most a slot; 0: nothing.
  int64_t SentBytes(int peer, int64_t step) const { return Bytes(movement_.rank, peer, step); }
  int64_t ReceivedBytes(int peer, int64_t step) const { return Bytes(peer, movement_.rank, step); }
  void Fill(int peer, int64_t step, std::byte* slot) const;
  void Consume(int64_t step, Received received) const;

 private:
  int64_t Bytes(int from, int to, int64_t step) const {
    return flat_.BytesOf(movement_.Sent(from, to).range.Step(step, per_step_));
  }

  const Movement& movement_;
  const FlatSpans& flat_;
  const int64_t per_step_;
  Transfer& transfer_;
  ThreadTeam& team_;
};

class TaskCommunicator : public CommunicatorBackend {
 public:
  int rank() const override { return members_.rank; }
  int size() const override { return members_.size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;

 protected:
  // `calls`: of the world; null: there is one rank. `id`: as WaitCycles::Lane.
  TaskCommunicator(Members members, CallOrder* calls, std::string_view id);
  // Null: there is one rank in the world.
  WaitCycles::Lane* lane() { return lane_.has_value() ? &*lane_ : nullptr; }
  const Members& members() const { return members_; }
  Transfer& transfer() { return transfer_; }

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
  // `collective`: its number among the collectives, or 0.
  void RunInTurn(const Collective& call, uint64_t number, uint64_t collective, ThreadTeam& team);

  const Members members_;
  Transfer transfer_;
  std::optional<WaitCycles::Lane> lane_;
  uint64_t taken_ = 0, collectives_ = 0;
  const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();
};

}  // namespace ebb
