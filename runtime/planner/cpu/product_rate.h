// Operations a second of products on cores, by oneDNN, as trainers on CPUs have them.
#pragma once

#include "absl/status/statusor.h"

namespace ebb::planner {

// The rate of so many threads that multiply at once: bf16 where the CPU multiplies it at full
// speed, else fp32, to which trainers then convert bf16.
absl::StatusOr<double> ProductRateOfCores(int threads);

}  // namespace ebb::planner
