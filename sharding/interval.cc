#include "ebb/sharding/interval.h"

#include <algorithm>

namespace ebb::sharding {

std::vector<Interval> IntervalsIn(const Section& section, int64_t begin, int64_t end) {
  std::vector<Interval> intervals;
  for (const PlacedParameter& placement : section.placements) {
    const int64_t from = std::max(begin, placement.offset);
    const int64_t to = std::min(end, placement.offset + placement.elements);
    if (from >= to) continue;
    intervals.push_back({.parameter = placement.parameter,
                         .begin = from - placement.offset,
                         .end = to - placement.offset,
                         .offset = from - begin});
  }
  return intervals;
}

std::vector<Interval> IntervalsOf(const Section& section, int rank) {
  return IntervalsIn(section, rank * section.shard, (rank + 1) * section.shard);
}

Slice SliceOf(const ModelSpec& model, ParameterId parameter, int64_t begin, int64_t end) {
  return {.parameter = parameter,
          .name = model[parameter].name,
          .shape = model[parameter].shape,
          .begin = begin,
          .end = end};
}

}  // namespace ebb::sharding
