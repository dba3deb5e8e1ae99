// One rank's view of a group of ranks that share memory: which call each rank has come to, and the
// first failure. The group is a communicator, or a world in which communicators are formed.
//
// An operation is a few meetings, and so is forming a group. At a meeting each rank publishes its
// call or proposal and arrives; after the meeting it knows those of all ranks. A meeting costs each
// rank one atomic increment, and the last rank to come one system call. Failing and leaving end the
// waits for every meeting that is not complete.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/shared/layout.h"
#include "ebb/runtime/comm/shared/shared_file.h"
#include "ebb/runtime/comm/wait_cycles.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class SharedWorld;

class SharedGroup {
 public:
  // A rank's place in a communicator. `offset`: of its memory.
  struct Place {
    Members members = {};
    std::string path = {};  // no other communicator that shares ranks with it has it
    int64_t offset = 0;
    shared::GroupLayout layout{1};
    Mapping memory;
  };

  SharedGroup(SharedWorld& world, Place place);
  // Frees the memory if this rank is the last user.
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // Long waits of operations are published in `lane`, which outlives them. Null: nowhere.
  void PublishWaits(WaitCycles::Lane* lane) { lane_ = lane; }

  const Members& members() const { return place_.members; }
  int rank() const { return members().rank; }
  int size() const { return members().size(); }
  const std::string& path() const { return place_.path; }
  const CommunicatorOptions& options() const { return members().options; }
  SharedWorld& world() const { return world_; }

  shared::GroupHeader& header() const {
    return *reinterpret_cast<shared::GroupHeader*>(place_.memory.data());
  }
  shared::RankRecord& record(int rank) const {
    return reinterpret_cast<shared::RankRecord*>(place_.memory.data() +
                                                 place_.layout.records())[rank];
  }
  shared::RankRecord& mine() const { return record(rank()); }
  int64_t slot_bytes() const { return place_.layout.slot_bytes(); }
  std::byte* slot(int rank, uint64_t meeting) const {
    return place_.memory.data() + place_.layout.slot(rank, meeting);
  }
  // The call of `rank` for `meeting`.
  shared::RankRecord::Call& call(int rank, uint64_t meeting) const {
    return record(rank).calls[meeting % shared::kSlots];
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
  // `receive`, and returns when both are done. The peer's post is record(peer).post. False: the
  // communicator has failed.
  bool Exchange(const shared::RankRecord::Call& call, WaitPoint::Deadline deadline,
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

  // The group that this rank forms with other ranks of this world. All ranks call it in the same
  // order. Threads may attach an object, and see the members' objects, by rank, while these
  // certainly exist.
  absl::StatusOr<Place> Join(
      const Proposal& proposal, const void* attached = nullptr,
      absl::FunctionRef<void(int rank, const void* attached)> see = [](int, const void*) {});

  bool failed() const;
  absl::Status status() const;
  // The first failure stays.
  void Fail(const absl::Status& why);
  // This rank has decided to fail it.
  void Abort(const absl::Status& why);
  // This rank makes no more calls.
  void Leave(const std::string& how);

 private:
  absl::Status AwaitMeeting(uint64_t meeting, const CommunicatorOptions& options,
                            const CallSummary* call, WaitPoint::Deadline deadline,
                            bool is_agreed = false);
  // Waits until `condition()` or a failure. `log_wait`: called with the seconds, when the log is to
  // report the wait.
  void Sleep(absl::FunctionRef<bool()> condition, WaitPoint::Deadline deadline,
             const NoticeTimes& notices, absl::FunctionRef<void(double seconds)> log_wait,
             absl::FunctionRef<void()> look);
  // A long wait looks whether it is in vain.
  void LookForCycle(std::span<const int> absent);
  void LogWait(const CommunicatorOptions& options, const CallSummary* call,
               std::span<const int> absent, double seconds);
  void FailLate(const CommunicatorOptions& options, const CallSummary* call,
                std::span<const int> absent);
  void FailBecauseLeft(int rank, const CallSummary* call);
  std::string HowLeft(int rank) const;
  absl::StatusOr<int64_t> MakeMemory(const shared::GroupLayout& layout, int ranks);
  WaitPoint& point() const;

  SharedWorld& world_;
  Place place_;
  const bool spins_;
  // How long a waiter spins before it sleeps: longer where spinning has helped. Zero where there
  // are more ranks than cores, because a spinning waiter would keep the awaited rank from its core.
  std::chrono::nanoseconds spin_{2000};
  std::vector<uint64_t> exchanges_;  // with each peer
  uint64_t formed_ = 0;
  WaitCycles::Lane* lane_ = nullptr;
  mutable std::mutex mutex_;
  mutable absl::Status status_;  // as this rank has first seen it
};

}  // namespace ebb
