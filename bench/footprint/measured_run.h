// Trains a few steps of an engine, with threads as ranks, in a process of its own, so that the
// system counts only this engine. It runs no kernels, but touches every byte that they would touch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/answer.h"
#include "ebb/sharding/state.h"

namespace ebb::bench {

struct MeasuredRun {
  planner::Choice choice;
  int world = 1;
  std::vector<MemoryRow> rows;  // rank 0's: predicted, and the counted peak
  // One rank's growth of the peak resident set from before the engine, and the predicted part of
  // it: the pools of device and RAM, and the program, without the staging of calls that ask for
  // state.
  int64_t resident = 0, predicted_resident = 0;
};

// Uses the ranks, batch and context of `question`. `folder`: for state on NVMe. Call it in a
// process without threads.
absl::StatusOr<MeasuredRun> Measure(const planner::Question& question,
                                    const planner::Choice& choice, const std::string& folder,
                                    int steps);

}  // namespace ebb::bench
