// The order of things that streams and waits guarantee: vector clocks, one entry a line. A thing
// happens after everything that ended on the line where it starts and after all it waits for, and
// after nothing else. Transfers with swap files start on one line and end on another, in the same
// order on both, but one may start before the transfer ahead of it ends.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "ebb/sharding/op_list.h"

namespace ebb::sharding {

class HappensBefore {
 public:
  static constexpr int kStart = -1;  // before everything

  HappensBefore() { lines_.fill(None()); }

  // The next thing on these lines. Things are numbered in the order in which they are added.
  int Add(Line starts, Line ends, std::span<const int> after);

  // Whether `first` is certain to be over when `then` starts.
  bool Before(int first, int then) const {
    if (first == kStart) return true;
    return first != then && things_[then].starts[things_[first].line] >= first;
  }
  // Whether it is over, in every case, when the next operation on `line` starts.
  bool IsOver(int thing, Line line) const {
    return thing == kStart || lines_[line][things_[thing].line] >= thing;
  }
  Line line(int thing) const { return things_[thing].line; }

 private:
  using Clock = std::array<int, kLines>;  // the last thing of each line that is over
  static Clock None() {
    Clock none;
    none.fill(kStart);
    return none;
  }
  struct Thing {
    Line line;           // where it ends
    Clock starts, ends;  // the operations that are over when it starts, and when it has ended
  };
  std::vector<Thing> things_;
  std::array<Clock, kLines> lines_;
};

}  // namespace ebb::sharding
