// CPU ranks on several hosts, started by an MPI launcher. What differs from communicator.h: nothing. Every rank sends
// every other what it needs; inside a host MPI's own shared memory moves the bytes. Ranks that turn out to share a
// host's memory become a world of processes in shared memory.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/launch/launch.h"

namespace ebb {

bool HasMpi();  // whether this build does

// This process's rank of the world that `launch` describes; waits for all others, at most
// `timeout_seconds`. A program that has initialised MPI itself has to have asked for
// MPI_THREAD_MULTIPLE, and ends MPI after its worlds; otherwise it is initialised here, and ended
// when the program exits. kUnimplemented: this build has no MPI.
absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const Launch& launch,
                                                          double timeout_seconds);

}  // namespace ebb
