// The last uses of every cell by all that has run. The first uses of a list wait for these,
// whatever list ran before. A stream is only a line here and an event a number. The frontier
// remembers how far each line is known to be behind the others, so that no wait comes twice.
//
// An event stands for its newest record, because an operation touches the same cells each time it
// runs. An operation that touches cells by parity has an event for each parity.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ebb/sharding/op_list.h"

namespace ebb::sharding {

class Frontier {
 public:
  explicit Frontier(int cells);

  // A new event, for operations that end on `line`.
  int AddEvent(Line line);
  int events() const { return static_cast<int>(events_.size()); }

  // Calls `wait(event)` for each event that an operation on `line` with these uses has to wait for.
  template <class Wait>
  void Enter(Line line, std::span<const CellUse> uses, int parity, Wait wait) {
    for (int event : FindNotOver(line, uses, parity)) {
      if (Covers(line, event)) continue;
      wait(event);
      Follow(line, event);
    }
  }
  // Calls `visit(event)` for each last use of the cell.
  template <class Visit>
  void ForEachUse(int cell, Visit visit) const {
    const Cell& of = cells_[cell];
    if (of.writer >= 0) visit(of.writer);
    for (int reader : of.readers)
      if (reader >= 0) visit(reader);
  }
  // The next operation on `line` starts after the newest record of `event`.
  void Follow(Line line, int event);
  // An operation was issued that starts and ends on these lines; -1: without an event.
  void Issue(Line starts, Line ends, int event);
  // The last uses of the cells are now those of that operation.
  void Leave(std::span<const CellUse> uses, int parity, int event);
  // Whether the operation of the newest record of `event` is over before the next start on `line`.
  bool Covers(Line line, int event) const {
    const Recorded& of = events_[event];
    return clocks_[line][of.line] >= of.number;
  }
  // A list has ended early, so its last uses are not known. From now on these events, one of
  // each of their lines, stand for the uses of all cells on these lines.
  void SetFloor(std::vector<int> events);
  std::span<const int> floor() const { return floor_; }
  // Every line is idle: no operation has to wait.
  void Clear();

 private:
  using Clock = std::array<int64_t, kLines>;  // by line: operations on it that are over
  struct Cell {
    int writer = -1;
    std::array<int, kLines> readers = None();  // by line: events since the write
  };
  struct Recorded {
    Line line = 0;
    int64_t number = 0;  // of the operation, on its line; 0: not recorded yet
    int64_t order = 0;   // among the operations of all lines
    int64_t search = 0;  // the last search that found this event
    Clock clock = {};
  };
  static constexpr std::array<int, kLines> None() {
    std::array<int, kLines> none{};
    none.fill(-1);
    return none;
  }
  // Newest first, because a newer event may cover older ones.
  std::span<const int> FindNotOver(Line line, std::span<const CellUse> uses, int parity);
  static int At(const CellUse& use, int parity) {
    return use.by_parity ? use.cell ^ parity : use.cell;
  }

  std::vector<Cell> cells_;
  std::vector<Recorded> events_;
  std::vector<int> floor_;
  std::array<Clock, kLines> clocks_ = {};
  std::array<int64_t, kLines> issued_ = {};
  int64_t recorded_ = 0, search_ = 0;
  std::vector<int> not_over_;  // of FindNotOver
};

}  // namespace ebb::sharding
