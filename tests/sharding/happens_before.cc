#include "happens_before.h"

#include <algorithm>

namespace ebb::sharding {

int HappensBefore::Add(StreamId stream, std::span<const int> after) {
  const int number = static_cast<int>(things_.size());
  int& last = last_[static_cast<int>(stream)];
  Thing thing{.stream = stream, .clock = {}};
  std::fill(std::begin(thing.clock), std::end(thing.clock), kStart);
  const auto follow = [&](int other) {
    if (other == kStart) return;
    for (int s = 0; s < kStreams; ++s)
      thing.clock[s] = std::max(thing.clock[s], things_[other].clock[s]);
  };
  const auto after_all_of = [&](int other) {
    follow(other);
    if (other == kStart) return;
    int& over = thing.clock[static_cast<int>(things_[other].stream)];
    over = std::max(over, other);
  };
  const bool overlaps = stream == StreamId::kReadParameters || stream == StreamId::kReadStates ||
                        stream == StreamId::kWrite;
  if (overlaps) {
    follow(last);  // has started
  } else {
    after_all_of(last);
  }
  for (int other : after) after_all_of(other);
  last = number;
  things_.push_back(thing);
  return number;
}

}  // namespace ebb::sharding
