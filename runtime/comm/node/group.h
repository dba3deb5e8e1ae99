// One process's view of a communicator between processes of a host: where the others are with their
// calls, whose data is where, and the first failure.
//
// No rank ever reads another's own memory: what is for others is staged in shared memory that
// stays as long as anybody maps it. So an operation's buffers are free as soon as it has ended on
// its rank, however it has ended, and a rank that dies leaves nothing dangling.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/node/board.h"
#include "ebb/runtime/comm/node/layout.h"
#include "ebb/runtime/comm/node/world.h"
#include "ebb/runtime/comm/turns.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class NodeGroup {
 public:
  NodeGroup(std::shared_ptr<NodeWorld> world, node::Board::Place place);
  // Gives the pages back if this process is the last that uses them.
  ~NodeGroup();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  int world_rank(int rank) const { return world_ranks_[static_cast<size_t>(rank)]; }
  int named_rank(int rank) const { return world_->named_rank(world_rank(rank)); }
  const CommunicatorOptions& options() const { return options_; }
  const std::shared_ptr<NodeWorld>& world() const { return world_; }
  const node::GroupLayout& layout() const { return layout_; }
  node::Board& splits() { return *splits_; }
  Turns& turns() { return turns_; }

  node::GroupHeader& header() { return *reinterpret_cast<node::GroupHeader*>(memory_.data()); }
  node::GroupSeat& seat(int rank) {
    return reinterpret_cast<node::GroupSeat*>(memory_.data() + layout_.seats())[rank];
  }
  node::RingCounters& ring(int rank, int lane, int ring) { return seat(rank).rings[lane][ring]; }
  std::byte* slot(int rank, int lane, int ring, uint64_t step) {
    return memory_.data() + layout_.slot(rank, lane, ring, step);
  }
  std::byte* exchange_slot(int rank, uint64_t step) {
    return memory_.data() + layout_.exchange_slot(rank, step);
  }
  // How many of `peer`'s exchanges with `rank` the latter has seen.
  std::atomic<uint64_t>& seen(int rank, int peer) {
    return reinterpret_cast<std::atomic<uint64_t>*>(memory_.data() + layout_.seen() +
                                                    rank * layout_.seen_row())[peer];
  }

  // How long a waiter spins before it sleeps: longer where that has helped, not at all where
  // there are more ranks than cores. One for each waiting thread.
  struct Spin {
    std::chrono::nanoseconds time{2000};
  };
  // Waits until `condition()`, which only `rank` can make true. False: the group has failed, by
  // this call if the rank has left or is late in `call`.
  template <class Condition>
  bool AwaitRank(int rank, const Collective& call, WaitPoint::Deadline deadline, Spin& spin,
                 Condition condition) {
    if (condition()) return true;
    Sleep([&] { return condition() || HasLeft(rank); }, deadline, spin,
          [&](double seconds) {
            SayWaiting(call, {&rank, 1}, seconds);
          });
    if (condition()) return true;
    return Missed(rank, call);
  }
  // Until `condition()` or the group has failed. `say`: of the seconds, when the log is to hear of it.
  template <class Condition, class Say>
  void Sleep(Condition condition, WaitPoint::Deadline deadline, Spin& spin, Say say) {
    const auto begin = WaitPoint::Clock::now();
    const std::chrono::nanoseconds time = spins_ ? spin.time : std::chrono::nanoseconds(0);
    AwaitAndSay(
        world_->point(world_rank(rank_), point_), [&] { return condition() || failed(); }, deadline,
        time, options_.notices, say);
    constexpr std::chrono::nanoseconds kShortest{1000}, kLongest{30'000};
    const bool slept = WaitPoint::Clock::now() - begin > time;
    spin.time = slept ? std::max(kShortest, spin.time / 2) : std::min(kLongest, spin.time * 2);
  }
  void Wake(int rank) { world_->point(world_rank(rank), point_).Notify(); }
  void WakeOthers();

  bool HasLeft(int rank) {
    return seat(rank).farewell.left.load(std::memory_order_acquire) != 0 ||
           world_->place(world_rank(rank)).ended.load(std::memory_order_acquire) != 0;
  }
  // This rank calls nothing any more.
  void Leave(const std::string& how);

  bool failed() { return header().failure.is_set() || world_->failed(); }
  absl::Status status();
  // The first failure stays.
  void Fail(const absl::Status& why);
  // `call` of this rank has waited `seconds` for `absent`. One of those that wait says so, once.
  void SayWaiting(const Collective& call, std::span<const int> absent, double seconds);
  void FailLate(const Collective& call, const std::string& for_what, const std::string& more = "");
  void FailLate(const Collective& call, std::span<const int> absent);
  void FailMismatch(int first, const CallSummary& first_call, int second,
                    const CallSummary& second_call);
  // The group fails because `rank` has left, or is late. False.
  bool Missed(int rank, const Collective& call);
  std::string RankName(int rank) const;

 private:
  const std::shared_ptr<NodeWorld> world_;
  const CommunicatorOptions options_;
  const std::vector<int> world_ranks_;
  const std::vector<int> named_ranks_;
  const int rank_;
  const int64_t offset_;
  const node::GroupLayout layout_;
  const Mapping memory_;
  const int point_;
  const bool spins_;
  Turns turns_;
  std::unique_ptr<node::Board> splits_;
  std::mutex mutex_;
  WaitPoint::Deadline said_until_ = {};  // threads of one operation wait for the same rank
  absl::Status status_;                  // as this process has first seen it
};

}  // namespace ebb
