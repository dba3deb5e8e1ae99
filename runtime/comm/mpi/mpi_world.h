// CPU ranks on several hosts, started by an MPI launcher: shared memory connects those of a host,
// MPI the hosts. What differs from communicator.h: nothing.
//
// Where every host has the same number of ranks, numbered host by host, collectives have two
// levels, and a byte crosses the network once for each host that needs it; a reduce-scatter does if
// the reduction group is a host's ranks, which is the default: each host then sends one fp32 partial
// of a slice. With other numberings and groups every rank sends to every other what it needs, which
// is right and slower.
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
