// Neighbouring elements with options of their own, as one update (update.h) takes them: the rule is
// one, its constants differ.
//
//   shard   [ weights            | biases | weights      | padding ]
//   runs      end 4096, set 0      4160, 1  8192, set 0
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ebb/optim/update_arrays.h"
#include "ebb/optim/update_constants.h"

namespace ebb::optim {

// Runs end at multiples of so many elements, so that what a thread takes at once is in one of them.
inline constexpr int64_t kRunMultiple = 8;

struct UpdateRun {
  int64_t end = 0;  // its first element is the one behind the run before it
  int64_t set = 0;  // of constants
};

// Memory that whoever updates reaches, read when the update runs.
struct UpdateRuns {
  // Sets, which differ neither in `step` nor in `apply`.
  std::span<const UpdateConstants> constants;
  // In order, up to the last element of the arrays or beyond it; none: the first set is everyone's.
  std::span<const UpdateRun> runs = {};
  int64_t begin = 0;  // the arrays' first element, counted as `end` counts; a multiple, too
};

// Elements [begin, begin + count) of the arrays.
UpdateArrays PartOf(const UpdateArrays& arrays, int64_t begin, int64_t count);

// visit(arrays, constants) of each run that the arrays have a part in, where the host reads the runs.
template <class Visit>
void ForEachRun(const UpdateArrays& arrays, const UpdateRuns& runs, const Visit& visit) {
  if (runs.runs.empty()) return visit(arrays, runs.constants.front());
  int64_t at = 0;
  for (const UpdateRun& run : runs.runs) {
    const int64_t end = std::min(run.end - runs.begin, arrays.count);
    if (end <= at) continue;
    visit(PartOf(arrays, at, end - at), runs.constants[static_cast<size_t>(run.set)]);
    at = end;
  }
}

}  // namespace ebb::optim
