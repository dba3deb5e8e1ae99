// Operations on memory that other ranks cannot read. Step by step every rank puts what each other
// rank needs, unreduced, into slots, and takes what the others have put there for it. Ranks of a
// host read a slot in place (shared/communicator.h), others get a message (mpi/communicator.h).
// Sums have the order of communicator.h for any size of step, because a step's inputs are read at
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ebb/runtime/comm/movement.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

// A movement in steps of a slot. Ranks that see the same call have the same steps.
class StagedMovement {
 public:
  // Where this rank finds what `peer` has sent it in a step.
  using Received = absl::FunctionRef<const std::byte*(int peer, int64_t step)>;

  // `inputs`: memory for a pointer to each rank's elements.
  StagedMovement(const Movement& movement, int64_t slot_bytes, int reduction_group,
                 std::vector<const void*>& inputs, ThreadTeam& team)
      : movement_(movement),
        flat_(movement.flat),
        per_step_(slot_bytes / flat_.element_bytes()),
        reduction_group_(reduction_group),
        inputs_(inputs),
        team_(team) {}

  const Collective& call() const { return movement_.call; }
  // One slot is filled for all.
  bool same_for_all() const { return movement_.same_for_all(); }
  int64_t steps() const { return (movement_.elements_max() + per_step_ - 1) / per_step_; }
  // At most a slot; 0: nothing.
  int64_t SentBytes(int peer, int64_t step) const { return BytesOf(SentTo(peer), step); }
  int64_t ReceivedBytes(int peer, int64_t step) const { return BytesOf(SentFrom(peer), step); }
  void Fill(int peer, int64_t step, std::byte* slot) const;
  void Consume(int64_t step, Received received) const;
  // What this rank sends to itself and no one sums.
  void CopyOwn() const;

 private:
  Movement::Part SentTo(int peer) const { return movement_.Sent(movement_.rank, peer); }
  Movement::Part SentFrom(int peer) const { return movement_.Sent(peer, movement_.rank); }
  ElementRange At(const Movement::Part& part, int64_t step) const {
    return part.range.Step(step, per_step_);
  }
  int64_t BytesOf(const Movement::Part& part, int64_t step) const {
    return flat_.BytesOf(At(part, step));
  }
  void Sum(int64_t step, Received received) const;

  const Movement& movement_;
  const FlatSpans& flat_;
  const int64_t per_step_;
  const int reduction_group_;
  std::vector<const void*>& inputs_;
  ThreadTeam& team_;
};

}  // namespace ebb
