// Maps the buffers of the other ranks of a host, so that they are read in place.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/shared/shared_file.h"

namespace ebb::shared {

// Installs this process's shared heap and maps the heaps of all other ranks for reading, by rank.
// The same on all ranks: empty if one of them cannot map, for example because a container hides
// processes from each other. Operations are then staged. Every rank calls it.
absl::StatusOr<std::vector<Mapping>> MapPeerMemory(int rank, Rendezvous& rendezvous);

}  // namespace ebb::shared
