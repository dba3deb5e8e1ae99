// Replaces products on cores in a build without oneDNN and OpenMP.
#include "absl/status/status.h"
#include "ebb/runtime/planner/measure.h"

namespace ebb::planner {

absl::StatusOr<double> ProductRateOfCores(int) {
  return absl::UnimplementedError(
      "this build has no oneDNN, which measures the products of cores: install libdnnl-dev and "
      "configure again, or write gpu_teraflops into a file for --machine");
}

}  // namespace ebb::planner
