// Collectives of memory that other ranks cannot read. Step by step every rank puts what each other
// rank needs, unreduced, into slots, and takes what the others have put there for it. A StepChannel
// moves a slot to another rank: ranks of a host read it in place (shared/ring.h), others get a
// message (mpi/messages.h). Sums have the order of communicator.h for any size of step, because a
// step's inputs are read at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class StepChannel {
 public:
  // What one operation moves. Ranks that see the same call compute the same Load.
  struct Load {
    int64_t steps = 0;
    // The sent bytes do not depend on the peer: one slot is filled for all.
    bool same_for_all = false;
    // At most slot_bytes(same_for_all); 0: nothing.
    absl::FunctionRef<int64_t(int peer, int64_t step)> sent_bytes;
    absl::FunctionRef<int64_t(int peer, int64_t step)> received_bytes;
    absl::FunctionRef<void(int peer, int64_t step, std::byte* slot)> fill;
    absl::FunctionRef<void(int64_t step)> consume;
  };

  virtual ~StepChannel() = default;
  virtual int64_t slot_bytes(bool same_for_all) const = 0;
  // False: the communicator has failed.
  virtual bool Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline) = 0;
  // For use in `consume`.
  virtual const std::byte* Received(int peer, int64_t step) const = 0;
};

class StagedOperations {
 public:
  StagedOperations(int rank, int size, int reduction_group, StepChannel& channel);

  // Call it once all have made the same call. False: the communicator has failed.
  bool Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);

 private:
  const int rank_, size_, reduction_group_;
  StepChannel& channel_;
  std::vector<const void*> inputs_;  // of a reduction, by rank
};

}  // namespace ebb
