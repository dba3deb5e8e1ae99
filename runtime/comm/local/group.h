// What the ranks of one `local` communicator share: where they meet, what each has called, and the
// first failure.
//
// An operation: each rank publishes its call, all meet, each reads what it needs straight from the
// others' memory, all meet again. The second meeting is what lets a rank's buffers go.
//
//   rank 0   publish --+-- read others --+-- done
//   rank 1   publish --+-- read others --+-- done
//
// A meeting costs each rank one atomic increment, and one system call to the last that comes.
//
// Failing and leaving break every meeting that is not complete. A rank that gives up waits until none
// is reading, so memory is never read after its owner's operation has ended, however it has.
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
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/local/formation.h"
#include "ebb/runtime/comm/turns.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class LocalGroup {
 public:
  // One rank's place, on cache lines of its own.
  struct alignas(64) Seat {
    Collective call;  // of the current operation; others read it once it is published by a meeting
                      // or posted
    uint64_t fingerprint = 0;
    std::atomic<uint64_t> meetings{0};  // that this rank has come to
    Turns turns;                        // of this rank's operations
    std::atomic<bool> left{false};
    std::string how_left;
    WaitPoint own;  // this rank's waits for its peer
    // Of a communicator on a device (device_communicator.h); set before the first operation.
    std::vector<Event> marks;

    // Point to point; guarded by exchange_mutex_.
    bool posted = false;  // the call waits for its peer
    bool taken = false;   // and the peer is copying: too late to give up
    std::atomic<bool> exchanged{false};
  };

  // `world_ranks`: of the members, in the order of their ranks here.
  LocalGroup(LocalWorld& world, CommunicatorOptions options, std::vector<int> world_ranks);

  int size() const { return static_cast<int>(world_ranks_.size()); }
  const CommunicatorOptions& options() const { return options_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  Formation& splits() { return splits_; }
  Seat& seat(int rank) { return seats_[static_cast<size_t>(rank)]; }

  // Comes to `rank`'s next meeting and waits for the others. False: the group has failed, by this
  // call if they are late.
  bool Meet(int rank, WaitPoint::Deadline deadline);
  // Between the first meeting and the second: whether all called the same. If not, the group fails.
  bool AllCalledTheSame();
  // One side of a send and receive. The rank that comes second calls `copy` with its peer's call.
  // False: the group has failed.
  bool Exchange(int rank, WaitPoint::Deadline deadline,
                absl::FunctionRef<void(const Collective& peer_call)> copy);

  // Around every access to another rank's memory or spans between two meetings. Not allowed once
  // the group has failed.
  class Reading {
   public:
    explicit Reading(LocalGroup& group);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    bool allowed() const { return allowed_; }

   private:
    LocalGroup& group_;
    bool allowed_;
  };
  // Once the group has failed: until all that were reading have stopped.
  void AwaitNoReader();

  // The first failure stays.
  void Fail(absl::Status why);
  bool failed() const { return failed_.load(std::memory_order_seq_cst); }
  absl::Status status() const;
  // `rank` will call nothing any more: a rank that waits for it, now or later, fails. `how` completes
  // "rank 1 has left: ...".
  void Leave(int rank, const std::string& how);
  // kDeadlineExceeded: `call` of `rank` has waited too long `for_what`, of which `more` is known.
  void FailLate(int rank, const Collective& call, const std::string& for_what,
                const std::string& more = "");

 private:
  void FailBecauseLeft(int rank);
  void FailIfAwaitedByAnExchange(int rank);
  void FailIfPeerIsAtACollective(int rank);
  void FailMismatch(int first, int second);
  void WakeAll();
  std::string RankName(int rank) const;  // "rank 1", or "rank 1 (world rank 5)"
  std::vector<int> Absent(uint64_t meeting);
  // `call` of `rank` has waited `seconds` for `absent`. One of those that wait says so.
  void SayWaiting(int rank, std::span<const int> absent, double seconds);

  LocalWorld& world_;
  const CommunicatorOptions options_;
  const std::vector<int> world_ranks_;
  const std::chrono::nanoseconds spin_;
  std::vector<Seat> seats_;
  Formation splits_;

  alignas(64) std::atomic<uint64_t> arrivals_{0};  // of all ranks at all meetings
  alignas(64) std::atomic<uint64_t> met_{0};       // meetings that are complete
  WaitPoint meeting_;                              // waits for meetings, and for readers to stop
  alignas(64) std::atomic<int> readers_{0};
  std::atomic<bool> failed_{false};
  std::atomic<int> left_{-1};   // the rank that left first
  std::atomic<int> posted_{0};  // seats with a posted call
  std::mutex exchange_mutex_;
  mutable std::mutex status_mutex_;
  absl::Status status_;
};

}  // namespace ebb
