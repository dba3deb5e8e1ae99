// CPU ranks on several hosts, started by an MPI launcher. They behave as communicator.h says. Every
// rank sends every other what it needs; inside a host MPI's own shared memory moves the bytes.
// Ranks that turn out to share a host's memory become a world of processes in shared memory.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/launch/launch.h"

namespace ebb {

// This process's rank of the world that `launch` describes. Waits for all others, at most
// `timeout_seconds`. A program that has initialised MPI itself must have asked for
// MPI_THREAD_MULTIPLE, and must end MPI after its worlds. Otherwise MPI is initialised here, and
// ended when the program exits.
absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const Launch& launch,
                                                          double timeout_seconds);

}  // namespace ebb
