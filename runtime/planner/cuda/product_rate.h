// Operations a second of a large bf16 product on a GPU, by cuBLASLt.
#pragma once

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb::planner {

// kUnavailable: there is no cuBLASLt. kUnimplemented: it has no such product for this GPU.
absl::StatusOr<double> ProductRateOfGpu(const Device& device);

}  // namespace ebb::planner
