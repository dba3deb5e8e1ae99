// Steps of staged operations as messages, in memory of their own: messages that are under way when
// an operation fails touch no other operation's memory. In step s a rank fills a slot for every
// peer that it sends to. It consumes later, at once, what all ranks have sent in that step:
//
//   fill 0 | fill 1 | fill 2 | fill 3, consume 0 | fill 4, consume 1 | ...
//
// A rank leaves an operation once all that it sent has been taken. MPI moves messages only while it
// is called, and the next call may be far away, behind kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/staged.h"

namespace ebb {

class MpiCommunicator;

class MpiMessages : public StepChannel {
 public:
  // Uses members of `communicator` only during operations.
  MpiMessages(MpiCommunicator& communicator, int size);

  int64_t slot_bytes(bool /*same_for_all*/) const override { return slot_bytes_; }
  bool Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline) override;
  const std::byte* Received(int peer, int64_t step) const override {
    return Slot(kSlots, peer, step);
  }
  // Whether nothing is under way.
  bool TestAll();

 private:
  static constexpr int kSlots = 4;

  // The slots for sending to a peer come first.
  std::byte* Slot(int first, int peer, int64_t step) const;
  MpiMessage& Message(int first, int peer, int64_t step);
  bool Send(const Collective& call, const Load& load, int64_t step, WaitPoint::Deadline deadline);
  void Expect(const Load& load, int64_t step);
  bool AwaitAll(const Collective& call, int first, int64_t step, WaitPoint::Deadline deadline);

  MpiCommunicator& communicator_;
  const int size_;
  const int64_t slot_bytes_;
  const MessageMemory memory_;
  std::vector<MpiMessage> messages_;
};

}  // namespace ebb
