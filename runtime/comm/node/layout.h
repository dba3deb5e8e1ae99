// What lies where in the memory that ranks of one host share. Zeros are the initial state of all of
// it but the wait points. Nothing here holds an address: every process maps it elsewhere.
//
//   a world:         header | places of ranks | a board
//   a communicator:  header | seats of ranks | a board | seen[N][N] | rings | exchange rings
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/node/shared_status.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb::node {

// Threads of a rank that each move a part of an operation's elements, on their own.
inline constexpr int kLanesMax = 8;
// What a lane has staged for others lies in a ring of slots. A rank's ring and those that it reads
// stay in its core's cache, which is what keeps the traffic to memory that of a copy.
inline constexpr int kSlots = 4;
inline constexpr int64_t kSlotBytes = int64_t{32} << 10;
// All of a lane's rings: one for inputs, one for the reduced results of an all-reduce.
inline constexpr int kRings = 2;
// A rank's waits are spread over several points, so that those of one communicator seldom wake
// those of another.
inline constexpr int kWaitPoints = 4;
// Operations of more spans are staged.
inline constexpr size_t kSharedSpansMax = 512;
inline constexpr size_t kNameBytesMax = 120;
inline constexpr size_t kHowBytesMax = 180;
inline constexpr int kReductionRing = 0, kResultRing = 1;

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "locks inside a process do not help others");

// That a rank will not come any more, and how it went. Written once, by the rank.
struct Farewell {
  std::atomic<uint32_t> left;
  char how[kHowBytesMax];
};

struct WorldHeader {
  SharedStatus failure;              // of all communicators
  std::atomic<int64_t> next_offset;  // of the file: where the next communicator's memory begins
};

struct alignas(64) Point {
  WaitPoint wait{WaitPoint::Scope::kProcesses};
};

struct alignas(64) RankPlace {
  std::array<Point, kWaitPoints> points;
  CallRecord calls;
  Farewell world;               // creates no more communicators
  std::atomic<uint32_t> ended;  // its process may end now: that is no failure
};

// What a rank proposes in one round of forming communicators.
struct SharedProposal {
  char name[kNameBytesMax];
  int32_t reduction_group;
  int32_t colour;
  int32_t key;
  double timeout_seconds;
};

// Odd and even rounds have a place each: a rank is at most one ahead of the slowest.
struct alignas(64) BoardSeat {
  std::atomic<int64_t> joined;  // rounds
  std::atomic<int64_t> formed;  // the last round in which this rank has made a group's memory
  SharedProposal proposals[2];
  int64_t offsets[2];  // of that memory
  int32_t codes[2];    // or why there is none
  char messages[2][256];
};

struct GroupHeader {
  SharedStatus failure;
  SharedStatus broken;         // no more parts are formed
  std::atomic<int32_t> users;  // processes that have not left; the last releases the pages
  alignas(64) std::atomic<uint64_t> arrivals;          // of all ranks at all operations
  alignas(64) std::atomic<uint64_t> meeting_arrivals;  // at all meetings inside operations
  std::atomic<int32_t> posted;                         // seats with a posted send or receive
};

struct alignas(64) RingCounters {
  std::atomic<uint64_t> written;               // slots filled by their owner, ever
  alignas(64) std::atomic<uint64_t> consumed;  // steps of others' rings that the owner has read
};

struct alignas(64) GroupSeat {
  std::atomic<uint64_t> called;  // operations of all ranks
  struct Header {
    CallSummary call;
    int32_t threads;  // that the rank can move elements with
    int32_t shared;   // whether all that others need of it is in its shared heap
  } headers[2];       // of odd and even operations
  // Where in that heap, by span.
  struct Offsets {
    int64_t send;
    int64_t receive;
  } spans[2][kSharedSpansMax];
  std::atomic<uint64_t> met;  // meetings of all ranks inside operations
  Farewell farewell;

  // A send or receive that waits for its peer: the number of the exchange between the two, and the
  // peer; 0: none.
  alignas(64) std::atomic<uint64_t> posted;
  CallSummary post;
  uint64_t post_sent;                       // `sent` when it was posted
  alignas(64) std::atomic<uint64_t> sent;   // slots of the exchange ring, ever
  alignas(64) std::atomic<uint64_t> taken;  // by the receivers
  RingCounters rings[kLanesMax][kRings];
};

// The offsets of a communicator's parts, for N ranks.
class GroupLayout {
 public:
  GroupLayout(int ranks, int lanes)
      : ranks_(ranks),
        lanes_(lanes),
        // At least a few cache lines for each peer, however many there are.
        slot_bytes_(std::max(kSlotBytes, int64_t{256} * ranks)) {}

  int lanes() const { return lanes_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t seats() const { return RoundUp(sizeof(GroupHeader)); }
  int64_t board() const { return seats() + ranks_ * int64_t{sizeof(GroupSeat)}; }
  int64_t seen() const { return board() + ranks_ * int64_t{sizeof(BoardSeat)}; }
  int64_t seen_row() const { return RoundUp(ranks_ * int64_t{8}); }
  int64_t slot(int rank, int lane, int ring, uint64_t step) const {
    const int64_t index = (int64_t{rank} * lanes_ + lane) * kRings + ring;
    return rings() + (index * kSlots + static_cast<int64_t>(step % kSlots)) * slot_bytes_;
  }
  int64_t exchange_slot(int rank, uint64_t step) const {
    return exchange_rings() +
           (int64_t{rank} * kSlots + static_cast<int64_t>(step % kSlots)) * slot_bytes_;
  }
  int64_t bytes() const { return exchange_rings() + int64_t{ranks_} * kSlots * slot_bytes_; }

 private:
  static constexpr int64_t kPage = 4096;
  static int64_t RoundUp(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t rings() const { return (seen() + ranks_ * seen_row() + kPage - 1) / kPage * kPage; }
  int64_t exchange_rings() const {
    return rings() + int64_t{ranks_} * lanes_ * kRings * kSlots * slot_bytes_;
  }

  int ranks_;
  int lanes_;
  int64_t slot_bytes_;
};

}  // namespace ebb::node
