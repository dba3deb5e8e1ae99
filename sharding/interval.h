// A range of a flat buffer as elements of parameters. Checkpoints, per-parameter options, reading
// and writing of state, and resharding all work on intervals.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

struct Interval {
  ParameterId parameter{};
  int64_t begin = 0, end = 0;  // elements of the flattened parameter
  int64_t offset = 0;          // of `begin`, in elements from the start of the range
};

// The parameters' elements in [begin, end) of the section's flat buffer, in declared order, without
// padding.
std::vector<Interval> IntervalsIn(const Section& section, int64_t begin, int64_t end);

// The intervals of one rank's slice.
std::vector<Interval> IntervalsOf(const Section& section, int rank);

// Elements [begin, end) of a flattened parameter, as functions of the trainer's get them.
Slice SliceOf(const ModelSpec& model, ParameterId parameter, int64_t begin, int64_t end);

}  // namespace ebb::sharding
