// What streams and dependencies guarantee about the order of things: vector clocks, one entry a
// stream. A thing happens after everything before it on its stream and after all it waits for, and
// after nothing else. Transfers with swap files start in the order of their stream and end in it,
// but one may start before the one ahead of it ends.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

class HappensBefore {
 public:
  static constexpr int kStart = -1;  // before everything

  // The next thing on `stream`. Things are numbered in the order in which they are added.
  int Add(StreamId stream, std::span<const int> after);

  // Whether `first` is certain to be over when `then` starts.
  bool Before(int first, int then) const {
    if (first == kStart) return true;
    return first != then && things_[then].clock[static_cast<int>(things_[first].stream)] >= first;
  }
  StreamId stream(int thing) const { return things_[thing].stream; }

 private:
  struct Thing {
    StreamId stream;
    std::array<int, kStreams> clock;  // the last thing of each stream that is over by then
  };
  std::vector<Thing> things_;
  std::array<int, kStreams> last_ = [] {
    std::array<int, kStreams> none;
    none.fill(kStart);
    return none;
  }();
};

}  // namespace ebb::sharding
