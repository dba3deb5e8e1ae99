// An engine that trains a few steps, ranks as threads, in a process of its own, so that what the system counts is
// its own. The kernels of the model are replaced by what touches every byte that they would.
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
  std::vector<MemoryRow> rows;  // of rank 0: predicted and, as most, counted
  // Of a rank: growth of the peak resident set since before there was an engine, and what of that was predicted:
  // pools of device and RAM, and the program. (Staging of state is touched by calls that ask for state alone.)
  int64_t resident = 0, predicted_resident = 0;
};

// `question`: its ranks, batch and context count. `folder`: of what is on NVMe. In a process without threads.
absl::StatusOr<MeasuredRun> Measure(const planner::Question& question,
                                    const planner::Choice& choice, const std::string& folder,
                                    int steps);

}  // namespace ebb::bench
