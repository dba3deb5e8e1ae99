// Issues lists like an engine, one after the other, as one rank sees them, and checks the order
// alone. If two operations touch the same bytes of that rank, and one of them writes, the second
// starts when the first is over. Nothing here knows of cells. The bytes are those of the operands
// at this rank's slice, and vector clocks decide what is over. Any one wait can be left out, to see
// whether it is missed.
#pragma once

#include <array>
#include <compare>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ebb/sharding/frontier.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/waits.h"
#include "happens_before.h"

namespace ebb::sharding {

// The bytes that operations of some lists touch on one rank, in stretches that no operand
// cuts. Operations are numbered over all lists, which outlive this.
class RankTouches {
 public:
  struct Touch {
    int begin = 0, end = 0;  // stretches
    bool writes = false;
    bool by_parity = false;  // one stretch; its neighbour is the other parity's
  };
  RankTouches(std::span<const OpList* const> lists, const Decisions& decisions, int rank);

  std::span<const Touch> Of(int op) const {
    const auto at = static_cast<size_t>(op);
    return std::span(touches_).subspan(first_touch_[at], first_touch_[at + 1] - first_touch_[at]);
  }
  int stretches() const { return stretches_; }

 private:
  std::vector<Touch> touches_;  // by operation, one behind the other
  std::vector<size_t> first_touch_ = {0};
  int stretches_ = 0;
};

// A wait of the operation `waiting`, for one of its own list or through the frontier.
struct TakenWait {
  int waiting = 0, awaited = 0;
  bool through_frontier = false;
  friend auto operator<=>(const TakenWait&, const TakenWait&) = default;
};

class OrderCheck {
 public:
  // `without`: the wait that is left out each time; the frontier believes that it was made. The
  // other arguments outlive this.
  OrderCheck(std::span<const OpList* const> lists, const Cells& cells, const RankTouches& touches,
             std::optional<TakenWait> without = std::nullopt);

  // Operations of the list with this number, in its step of this parity.
  void Run(int list, int begin, int end, int parity);
  // Runs the operation between two fences, wherever it has its place otherwise.
  void RunAlone(int list, int op);
  // Like StreamOrder: all streams of steps wait for all work issued on any of them. The host waits
  // too, and so does its later work.
  void Fence();
  void EndEarly();
  void WaitForSteps();
  // The host comes behind reads beside steps; behind everything.
  void WaitForReads();
  void WaitIdle();

  // The first; empty while there is none.
  const std::string& complaint() const { return complaint_; }
  // Waits that made a difference when they came: a fence, or the host, may have waited already.
  const std::set<TakenWait>& waits() const { return waits_; }

 private:
  struct Stretch {
    int writer = HappensBefore::kStart;
    std::array<int, kLines> readers;  // the last one on each line since it was written
  };
  void Add(int list, int index, int parity);
  void TouchAll(int thing, int op, Line line, int parity, bool carried);
  int AddFence(Line line, std::span<const int> after);
  std::vector<int> AddToSteps(std::span<const int> after);
  void Complain(int thing, int other);

  const std::span<const OpList* const> lists_;
  const RankTouches& touches_;
  const std::optional<TakenWait> without_;
  std::vector<int> first_;  // by list: the number of its first operation
  HappensBefore order_;
  Frontier frontier_;
  std::vector<std::array<int, 2>> events_;    // by operation and parity; -1: none
  std::vector<int> floor_;                    // by line: the event of a fence
  std::vector<int> op_of_event_;              // -1: a fence's
  std::vector<int> thing_of_event_, things_;  // the last; by event, by operation
  std::vector<int> op_of_thing_;
  std::vector<Stretch> stretches_;
  std::set<TakenWait> waits_;
  std::string complaint_;
};

}  // namespace ebb::sharding
