// This machine in figures, measured in a few seconds: RAM by copies, sums and updates, the disk by
// a file in a folder, arithmetic by oneDNN's products. The driver gives the number of GPUs and
// their free memory; the first GPU's memory and link are measured by copies, its arithmetic by
// cuBLASLt's products.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/machine.h"

namespace ebb::planner {

// `folder`: a folder on the disk; "": no disk is measured.
absl::StatusOr<Machine> MeasureHere(const std::string& folder);

}  // namespace ebb::planner
