// One rank's end of a communicator between hosts. First all ranks send each other what they have
// called, so that a missing rank, or one that calls something else, is known by name before
// anything moves. A rank that leaves announces that, too. The store forms communicators. A failure
// fails the whole world, and from then on no rank sends anything over MPI.
//
// Then elements move straight between the ranks in steps (task_communicator.h). In step s a rank
// fills a slot for every peer that it sends to. It consumes later, at once, what all ranks have
// sent in that step:
//
//   fill 0 | fill 1 | fill 2 | fill 3, consume 0 | fill 4, consume 1 | ...
//
// The slots are the communicator's own memory: messages that are under way when an operation fails
// touch no other operation's memory. A rank leaves an operation once all that it sent has been
// taken. MPI moves messages only while it is called, and the next call may be far away, behind
// kernels.
//
// All communicators of a world share one MPI communicator and differ by tags. MPI has no wait that
// a message ends, so a waiting rank polls (Backoff).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/task_communicator.h"

namespace ebb {

class MpiCommunicator : public TaskCommunicator {
 public:
  static constexpr int kTags = 2;  // of each communicator

  // This rank's end of a communicator of the ranks of `world`.
  static absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Form(
      const std::shared_ptr<MpiEndpoint>& endpoint, StoreGroup& world,
      const CommunicatorOptions& options);

  // Waits for what was enqueued, then leaves.
  ~MpiCommunicator() override;

  absl::Status status() const override { return store().status(); }
  void Abort(absl::Status why) override;

 protected:
  void Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) override;
  bool failed() override { return endpoint_->abandoned(); }
  void Fail(const absl::Status& why) override { store().Fail(why); }
  int64_t slot_bytes(bool /*same_for_all*/) const override { return slot_bytes_; }
  bool RunSteps(const StagedMovement& movement, WaitPoint::Deadline deadline) override;

 private:
  // A rank's message to a peer: its next call, or that it makes no more.
  struct Announcement {
    CallSummary call = {};
    bool leaves = false;
  };
  struct Announcements {
    Announcement incoming, outgoing, goodbye;
  };
  // Messages of announcements between this rank and a peer. The n-th announcement of the one
  // answers the n-th of the other.
  struct Pair {
    MpiMessage incoming, outgoing, goodbye;
    bool here = false;
  };
  // Slots for what a rank sends to a peer, and as many for what comes from it.
  static constexpr int kSlots = 4;
  enum Way : uint8_t { kSent, kReceived, kWays };

  MpiCommunicator(std::shared_ptr<MpiEndpoint> endpoint, std::shared_ptr<StoreGroup> group,
                  CommunicatorOptions options);
  int world_rank(int rank) const { return members().world_rank(rank); }
  int data_tag() const { return kTags * static_cast<int>(group_->number()) + 1; }
  void Announce(MpiMessage& message, int peer, const Announcement& announcement);
  void Expect(int peer);
  bool Meet(const Collective& call, std::span<const int> peers, WaitPoint::Deadline deadline);
  // Whether what `peer` has announced fits this rank's call.
  bool Fits(const CallSummary& mine, int peer);
  // Polls messages until `condition()`. False: the communicator has failed, by this call if the
  // ranks that `absent()` names are late.
  bool Await(const Collective& call, absl::FunctionRef<bool()> condition,
             absl::FunctionRef<std::vector<int>()> absent, WaitPoint::Deadline deadline);
  size_t SlotOf(Way way, int peer, int64_t step) const {
    return static_cast<size_t>((kWays * peer + way) * kSlots + step % kSlots);
  }
  std::byte* Slot(Way way, int peer, int64_t step) const {
    return slots_.get() + static_cast<int64_t>(SlotOf(way, peer, step)) * slot_bytes_;
  }
  void Expect(const StagedMovement& movement, int64_t step);
  bool Send(const StagedMovement& movement, int64_t step, WaitPoint::Deadline deadline);
  bool AwaitSlots(Way way, int64_t step, const Collective& call, WaitPoint::Deadline deadline);
  void Leave();
  Store& store() const { return endpoint_->store(); }

  const std::shared_ptr<MpiEndpoint> endpoint_;
  const std::shared_ptr<StoreGroup> group_;
  std::vector<int> others_;
  const std::shared_ptr<Announcements[]> announcements_;  // by peer
  std::vector<Pair> pairs_;
  std::vector<int> absent_;  // peers without an announcement yet
  const int64_t slot_bytes_;
  const std::shared_ptr<std::byte[]> slots_;
  std::vector<MpiMessage> messages_;  // by slot
};

}  // namespace ebb
