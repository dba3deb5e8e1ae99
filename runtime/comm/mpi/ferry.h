// Moves elements between the ranks of a communicator in steps, staged in memory of its own: what is
// under way when an operation fails touches no other's. In step s a rank fills a slot for every
// peer it sends to, and later consumes, at once, what all have sent in that step:
//
//   fill 0 | fill 1 | fill 2 | fill 3, consume 0 | fill 4, consume 1 | ...
//
// A rank leaves an operation once all that it sent has been taken. MPI moves messages only while it
// is called, and the next call may be far away: after kernels, or after waiting, in shared memory,
// for a rank that waits for just these messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mpi/group.h"

namespace ebb {

class Ferry {
 public:
  // What one operation moves; the same on all ranks as far as they see the same.
  struct Load {
    int64_t steps = 0;
    // What is sent does not depend on the peer: one slot is filled for all.
    bool same_for_all = false;
    // At most slot_bytes(); 0: nothing.
    absl::FunctionRef<int64_t(int peer, int64_t step)> sent_bytes;
    absl::FunctionRef<int64_t(int peer, int64_t step)> received_bytes;
    // False: the group has failed.
    absl::FunctionRef<bool(int peer, int64_t step, std::byte* slot)> fill;
    absl::FunctionRef<bool(int64_t step)> consume;
  };

  explicit Ferry(MpiGroup& group);
  // Waits until what was sent is on its way, if nothing has failed.
  ~Ferry();

  int64_t slot_bytes() const { return slot_bytes_; }
  // False: the group has failed.
  bool Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline);
  // In `consume`.
  const std::byte* Received(int peer, int64_t step) const { return Slot(kSlots, peer, step); }

 private:
  static constexpr int kSlots = 4;

  // The slots that a peer is sent to come first.
  std::byte* Slot(int first, int peer, int64_t step) const;
  MpiMessage& Sent(int peer, int64_t step) { return Message(0, peer, step); }
  MpiMessage& Expected(int peer, int64_t step) { return Message(kSlots, peer, step); }
  MpiMessage& Message(int first, int peer, int64_t step);
  bool Send(const Collective& call, const Load& load, int64_t step, WaitPoint::Deadline deadline);
  void Expect(const Load& load, int64_t step);
  bool AwaitAll(const Collective& call, int first, int64_t step, WaitPoint::Deadline deadline);

  MpiGroup& group_;
  const int64_t slot_bytes_;
  const MessageMemory memory_;
  std::vector<MpiMessage> messages_;
};

}  // namespace ebb
