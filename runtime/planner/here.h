// This machine in figures, measured in a few seconds: RAM by copying, the disk by a file in a folder, arithmetic by a
// product of matrices. Of GPUs what the driver says of their number and memory; their rates are those of the named
// machine with such GPUs.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/machine.h"

namespace ebb::planner {

// `folder`: on the disk; "": none is measured. kUnimplemented: GPUs of a kind that no named machine has.
absl::StatusOr<Machine> MeasureHere(const std::string& folder);

}  // namespace ebb::planner
