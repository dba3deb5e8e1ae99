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
  follow(last);
  for (int other : after) follow(other);
  thing.clock[static_cast<int>(stream)] = last = number;
  things_.push_back(thing);
  return number;
}

}  // namespace ebb::sharding
