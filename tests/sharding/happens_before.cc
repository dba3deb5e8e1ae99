#include "happens_before.h"

#include <algorithm>

namespace ebb::sharding {

int HappensBefore::Add(Line starts, Line ends, std::span<const int> after) {
  const auto follow = [](Clock& clock, const Clock& other) {
    for (size_t l = 0; l < clock.size(); ++l) clock[l] = std::max(clock[l], other[l]);
  };
  Clock& start = lines_[starts];
  for (int other : after) {
    if (other != kStart) follow(start, things_[other].ends);
  }
  Thing thing{.line = ends, .starts = start, .ends = lines_[ends]};
  follow(thing.ends, start);
  thing.ends[ends] = static_cast<int>(things_.size());
  lines_[ends] = thing.ends;
  things_.push_back(thing);
  return static_cast<int>(things_.size()) - 1;
}

}  // namespace ebb::sharding
