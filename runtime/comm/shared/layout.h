// The layout of the memory that ranks of one host share: this process's heap for threads, the pages
// of one file for processes. All of it but the wait points begins as zeros. Processes map it at
// different places, so only threads may use addresses.
//
//   a world:         header | places of ranks | a communicator without slots
//   a communicator:  header | records of ranks | slots of ranks
//
// In the communicator without slots the ranks form the others.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/shared/shared_status.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb::shared {

// A rank fills its slots in turn: it fills the next one while slower ranks read the ones before it
// (communicator.h).
inline constexpr int kSlots = 4;
inline constexpr int64_t kSlotBytes = int64_t{128} << 10;
// Communicators share the points where their ranks sleep, so that a rank that fails a world can
// wake all.
inline constexpr int kWaitPoints = 64;
inline constexpr size_t kReasonBytesMax = 2040;  // why a rank left: long enough for most errors

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "locks inside a process do not help others");

struct alignas(64) Point {
  explicit Point(WaitPoint::Scope scope) : wait(scope) {}
  WaitPoint wait;
};

struct WorldHeader {
  SharedStatus failure;              // of all communicators
  std::atomic<int64_t> next_offset;  // in the file: where the next communicator's memory begins
  std::atomic<uint32_t> next_point;
};

struct alignas(64) RankPlace {
  CallRecord calls;
  RankLog log;
  std::atomic<uint32_t> ended;  // its process may end now, which is no failure
};

struct GroupHeader {
  SharedStatus failure;        // of the communicator; or no more groups are formed in this one
  std::atomic<int32_t> users;  // ranks that have not left; the last releases the memory
  uint32_t point;
  std::atomic<int32_t> posted;   // records with a posted send or receive
  std::atomic<int32_t> readers;  // threads that read others' memory
  std::atomic<int32_t> left;     // 1 + the rank that left first
  // A rank may be one meeting ahead of another, so even and odd meetings have a count each.
  alignas(64) std::atomic<uint64_t> arrivals[2];
};

struct SharedProposal {
  uint32_t bytes;
  char packed[kProposalBytesMax];
  const void* attached;  // threads only: an object of the rank that the others may copy
};

struct alignas(64) RankRecord {
  std::atomic<uint64_t> arrived;  // meetings that the rank has come to
  std::atomic<uint32_t> has_left;
  char how_left[kReasonBytesMax];

  // The rank's calls, by meeting.
  struct Call {
    CallSummary summary;
    // The call's spans, for threads. Processes copy spans to the rank's slot, with heap offsets
    // instead of addresses.
    const CollectiveSpan* spans;
    int32_t readable;  // others can read the memory of it that they need
  } calls[kSlots];

  // A send or receive that waits for its peer: the number of the exchange between the two, the
  // peer, and which of the two the call is. 0: none.
  alignas(64) std::atomic<uint64_t> posted;
  Call post;
  uint64_t post_meeting;               // the last meeting before it
  std::atomic<uint64_t> acknowledged;  // by the receiver: the last exchange that is over
  std::atomic<int64_t> sent, taken;    // steps of the present exchange

  // Proposals for forming others, in odd and even rounds.
  SharedProposal proposals[2];
  int64_t formed[2];  // the memory of the group in which this rank is the first; -1: there is none
};

// The offsets of a communicator's parts, for `ranks` ranks.
class GroupLayout {
 public:
  explicit GroupLayout(int ranks, bool has_slots = true)
      : ranks_(ranks),
        // At least a few cache lines for each peer, whatever the number of peers.
        slot_bytes_(has_slots ? std::max(kSlotBytes, int64_t{256} * ranks) : 0) {}

  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t records() const { return RoundUp(sizeof(GroupHeader), 64); }
  int64_t slot(int rank, uint64_t meeting) const {
    return slots() +
           (int64_t{rank} * kSlots + static_cast<int64_t>(meeting % kSlots)) * slot_bytes_;
  }
  int64_t bytes() const { return slots() + int64_t{ranks_} * kSlots * slot_bytes_; }

 private:
  int64_t slots() const {
    constexpr int64_t kPage = 4096;
    return RoundUp(records() + ranks_ * int64_t{sizeof(RankRecord)}, kPage);
  }

  int ranks_;
  int64_t slot_bytes_;
};

// The offsets of a world's parts.
inline constexpr int64_t kPoints = RoundUp(sizeof(WorldHeader), 64);
struct WorldLayout {
  explicit WorldLayout(int ranks)
      : places(kPoints + kWaitPoints * int64_t{sizeof(Point)}),
        all(places + ranks * int64_t{sizeof(RankPlace)}),
        bytes(all + GroupLayout(ranks, /*has_slots=*/false).bytes()) {}
  int64_t places, all, bytes;
};

}  // namespace ebb::shared
