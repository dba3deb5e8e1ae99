// An engine that trains a few steps, with threads as ranks, in a process of its own, so that the
// system counts it alone. In place of the model's kernels, every byte that they touch is touched.
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
  // One rank's: the growth of the peak resident set since before there was an engine; and the
  // predicted part of it: pools of device and RAM, and the program. (Only calls that ask for state
  // touch its staging.)
  int64_t resident = 0, predicted_resident = 0;
};

// `question`: its ranks, batch and context count. `folder`: for state on NVMe. Call it in a process
// without threads.
absl::StatusOr<MeasuredRun> Measure(const planner::Question& question,
                                    const planner::Choice& choice, const std::string& folder,
                                    int steps);

}  // namespace ebb::bench
