// One rank's view of a communicator between ranks that share memory: which call each rank has come
// to, and the first failure.
//
// An operation is a few meetings. At a meeting each rank publishes its call and arrives; after the
// meeting it knows all ranks' calls. A meeting costs each rank one atomic increment, and the last
// rank to come one system call. Failing and leaving end the waits for every meeting that is not
// complete.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/shared/layout.h"
#include "ebb/runtime/comm/shared/shared_file.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class SharedWorld;

class SharedGroup {
 public:
  // A rank's place in a communicator. `bytes`: reserved for its memory.
  struct Place {
    CommunicatorOptions options;
    std::shared_ptr<StoreGroup> ranks;
    shared::GroupLayout layout;
    int64_t bytes = 0;
    Mapping memory = {};
  };
  // The communicator that this rank forms with other ranks of `parent`.
  static absl::StatusOr<Place> Form(SharedWorld& world, StoreGroup& parent,
                                    const Proposal& proposal);

  SharedGroup(SharedWorld& world, Place place);
  // Frees the memory if this rank is the last user.
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  int rank() const { return place_.ranks->rank(); }
  int size() const { return place_.ranks->size(); }
  const std::vector<int>& world_ranks() const { return place_.ranks->world_ranks(); }
  int world_rank(int rank) const { return world_ranks()[static_cast<size_t>(rank)]; }
  // In which others are formed.
  StoreGroup& ranks() const { return *place_.ranks; }
  const CommunicatorOptions& options() const { return place_.options; }

  shared::GroupHeader& header() const {
    return *reinterpret_cast<shared::GroupHeader*>(place_.memory.data());
  }
  shared::GroupSeat& seat(int rank) const {
    return reinterpret_cast<shared::GroupSeat*>(place_.memory.data() + place_.layout.seats())[rank];
  }
  shared::GroupSeat& mine() const { return seat(rank()); }
  int64_t slot_bytes() const { return place_.layout.slot_bytes(); }
  std::byte* slot(int rank, uint64_t meeting) const {
    return place_.memory.data() + place_.layout.slot(rank, meeting);
  }
  // The call of `rank` for `meeting`.
  shared::GroupSeat::Call& call(int rank, uint64_t meeting) const {
    return seat(rank).calls[meeting % shared::kSlots];
  }

  // The meeting that this rank comes to next, and coming to it. A rank comes to at most one more
  // meeting before it waits.
  uint64_t next() const { return mine().arrived.load() + 1; }
  uint64_t Arrive();
  // Waits until all have come. False: the communicator has failed, by this call if a rank has left
  // or is late.
  bool Await(uint64_t meeting, const CallSummary& call, WaitPoint::Deadline deadline);
  bool Meet(const CallSummary& call, WaitPoint::Deadline deadline) {
    return Await(Arrive(), call, deadline);
  }
  // Whether all ranks have made the same call for this meeting, which is over. If not, the
  // communicator fails.
  bool AllCalledTheSame(uint64_t meeting);

  // One side of a send and receive. Waits until the peer has posted the other side, calls `send` or
  // `receive`, and returns when both are done. The peer's post is seat(peer).post. False: the
  // communicator has failed.
  bool Exchange(const shared::GroupSeat::Call& call, WaitPoint::Deadline deadline,
                absl::FunctionRef<bool()> send, absl::FunctionRef<bool()> receive);
  // For use in `send` or `receive`: waits until `condition()`, which only the peer can make true.
  bool AwaitPeer(const CallSummary& call, WaitPoint::Deadline deadline,
                 absl::FunctionRef<bool()> condition);
  void Wake();

  // Around every access to another thread's memory or spans between two meetings. Refused once the
  // communicator has failed. Processes need none: the memory of other processes stays mapped.
  class Reading {
   public:
    explicit Reading(SharedGroup& group);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    bool allowed() const { return allowed_; }

   private:
    SharedGroup& group_;
    bool allowed_;
  };
  // Call it after a failure: waits until no thread is reading.
  void AwaitNoReader();

  bool failed() const;
  absl::Status status() const;
  // The first failure stays.
  void Fail(const absl::Status& why);
  // As TaskCommunicator's.
  void FailBehindAnother(const CallSummary& call);
  // This rank makes no more calls.
  void Leave(const std::string& how);

 private:
  // Waits until `condition()` or a failure. `say`: called with the seconds, when the log is to
  // report the wait.
  void Sleep(absl::FunctionRef<bool()> condition, WaitPoint::Deadline deadline,
             absl::FunctionRef<void(double seconds)> say);
  void SayWaiting(const CallSummary& call, std::span<const int> absent, double seconds);
  void FailLate(const CallSummary& call, std::span<const int> absent);
  void FailIfAwaited(const CallSummary& call, uint64_t meeting);
  bool FailBecauseLeft(int rank);
  void FailMismatch(int first, const CallSummary& first_call, int second,
                    const CallSummary& second_call);
  WaitPoint& point() const;
  std::string RankName(int rank) const;

  SharedWorld& world_;
  Place place_;
  const bool spins_;
  // How long a waiter spins before it sleeps: longer where spinning has helped. Zero where there
  // are more ranks than cores, because a spinning waiter would keep the awaited rank from its core.
  std::chrono::nanoseconds spin_{2000};
  std::vector<uint64_t> exchanges_;  // with each peer
  mutable std::mutex mutex_;
  mutable absl::Status status_;  // as this rank has first seen it
};

}  // namespace ebb
