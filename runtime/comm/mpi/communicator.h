// One rank's end of a communicator between hosts. First all ranks send each other what they have
// called, so that a missing rank, or one that calls something else, is known by name before
// anything moves. A rank that leaves announces that, too. Then elements move straight between the
// ranks, as staged operations. The store forms communicators. A failure fails the whole world, and
// from then on no rank sends anything over MPI.
//
// All communicators of a world share one MPI communicator and differ by tags. MPI has no wait that
// a message ends, so a waiting rank polls (Backoff).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/mpi/messages.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/staged.h"
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

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  absl::Status status() const override { return store().status(); }
  void Abort(absl::Status why) override;

  std::span<const int> others() const { return others_; }
  int world_rank(int rank) const { return group_->world_ranks()[static_cast<size_t>(rank)]; }
  MpiEndpoint& endpoint() { return *endpoint_; }
  int data_tag() const { return kTags * static_cast<int>(group_->number()) + 1; }

  // Polls messages until `condition()`. False: the communicator has failed, by this call if the
  // ranks that `absent()` names are late.
  bool Await(const Collective& call, absl::FunctionRef<bool()> condition,
             absl::FunctionRef<std::vector<int>()> absent, WaitPoint::Deadline deadline);

 protected:
  void Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) override;
  bool failed() override { return endpoint_->abandoned(); }
  void FailBehindAnother(const Collective& call) override;

 private:
  // What a rank sends to a peer: its next call, or that it makes no more.
  struct Announcement {
    CallSummary call = {};
    bool leaves = false;
  };
  // The announcements between this rank and a peer. The n-th announcement of the one answers the
  // n-th of the other.
  struct Pair {
    MpiMessage incoming, outgoing[2], goodbye;
    uint64_t sent = 0;
    bool here = false;
  };
  // Places of a pair's announcements.
  static constexpr int kIncoming = 0, kOutgoing = 1, kGoodbye = 3, kPlaces = 4;

  MpiCommunicator(std::shared_ptr<MpiEndpoint> endpoint, std::shared_ptr<StoreGroup> group,
                  CommunicatorOptions options);
  Announcement* AnnouncementOf(int peer, int place) const;
  void Announce(MpiMessage& message, int peer, int place, const Announcement& announcement);
  void Expect(int peer);
  bool Meet(const Collective& call, std::span<const int> peers, WaitPoint::Deadline deadline);
  // Whether what `peer` has announced fits this rank's call.
  bool Fits(const CallSummary& mine, int peer);
  void FailMismatch(int first, const CallSummary& first_call, int second,
                    const CallSummary& second_call);
  std::string RankName(int rank) const;
  void Leave();
  Store& store() const { return endpoint_->store(); }

  const std::shared_ptr<MpiEndpoint> endpoint_;
  const std::shared_ptr<StoreGroup> group_;
  const int rank_;
  const CommunicatorOptions options_;
  std::vector<int> others_;
  const MessageMemory announcements_;  // by peer, then place
  std::vector<Pair> pairs_;
  std::vector<int> absent_;  // peers without an announcement yet
  MpiMessages messages_;
  StagedOperations operations_;
};

}  // namespace ebb
