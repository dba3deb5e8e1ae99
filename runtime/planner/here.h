// This machine in figures, measured in a few seconds: RAM by copies, the disk by a file in a
// folder, arithmetic by a product of matrices. The driver gives the number and the memory of GPUs.
// Their rates are those of the named machine with the same GPUs.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/machine.h"

namespace ebb::planner {

// `folder`: a folder on the disk; "": no disk is measured. kUnimplemented: no named machine has
// such GPUs.
absl::StatusOr<Machine> MeasureHere(const std::string& folder);

}  // namespace ebb::planner
