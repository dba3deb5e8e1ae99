// Runs of neighbouring elements with their own options, for one update (update.h): one rule with
// different constants.
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

// Runs end at multiples of so many elements, so that a thread's group is in a single run.
inline constexpr int64_t kRunMultiple = 8;

struct UpdateRun {
  int64_t end = 0;  // it begins where the run before it ends
  int64_t set = 0;  // index among the sets of constants
};

// Memory that the updating thread or device reaches. It is read when the update runs.
struct UpdateRuns {
  // Sets, which have equal `step` and equal `apply`.
  std::span<const UpdateConstants> constants;
  // In order, up to the arrays' last element or beyond; empty: the first set is for all elements.
  std::span<const UpdateRun> runs = {};
  int64_t begin = 0;  // the arrays' first element, counted as in `end`; a multiple, too
};

// The state of `count` elements at this place: a piece (encoding.h), whose scales lie behind its codes.
StateArray PieceAt(void* place, const Encoding& encoding, int64_t count);

// Elements [begin, begin + count) of the arrays. With states in blocks, a part begins with a block.
StateArray PartOf(const StateArray& array, int64_t begin);
UpdateArrays PartOf(const UpdateArrays& arrays, int64_t begin, int64_t count);

// Calls visit(arrays, constants) for each run that the arrays have a part in, if the host reads the
// runs.
template <class Visit>
void ForEachRun(const UpdateArrays& arrays, const UpdateRuns& runs, const Visit& visit) {
  if (runs.runs.empty()) return visit(arrays, runs.constants.front());
  int64_t at = 0;
  for (const UpdateRun& run : runs.runs) {
    const int64_t end = std::min(run.end - runs.begin, arrays.count);
    if (end <= at) continue;
    visit(PartOf(arrays, at, end - at), runs.constants[run.set]);
    at = end;
  }
}

}  // namespace ebb::optim
