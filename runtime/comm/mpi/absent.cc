// Stands in for the communicator between hosts in a build without MPI.
#include "absl/status/status.h"
#include "ebb/runtime/comm/mpi/mpi_world.h"

namespace ebb {

bool HasMpi() {
  return false;
}

absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const Launch&, double) {
  return absl::UnimplementedError(
      "this build has no MPI, which connects CPU ranks on several hosts: configure with "
      "-DEBB_MPI=ON where an MPI is installed");
}

}  // namespace ebb
