// Facts that a rewrite of the plan or the engine must not change, as one line of text for each cell
// of the bitwise matrix and for each random plan. Made on two commits of one machine, the files are
// compared with diff.
#pragma once

#include <span>
#include <string>

#include "absl/status/status.h"
#include "tests/engine/matrix_cell.h"

namespace ebb::testing {

// Writes to `path`, in the order given:
//   cell  DESCRIPTION  state HASH  steps HASH  evaluation HASH
// and for 400 random models and configs, half of which offload a class:
//   plan  DESCRIPTION  memory HASH  traffic HASH  communication HASH  operations N  waits N
// or the error of the plan; and for each the seconds of a simulated step on a GPU and a CPU:
//   plan-time  DESCRIPTION  GPU SECONDS  CPU SECONDS
// The hashes of a cell and the tables of a plan have to be equal on both commits. A rewrite may
// lower operations, waits and seconds.
absl::Status WriteDigests(const std::string& path, std::span<const Cell> cells);

}  // namespace ebb::testing
