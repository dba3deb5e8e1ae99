// Maps the buffers of the other ranks of a host, so that they can be read where they are.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/shared/shared_file.h"

namespace ebb::shared {

// Installs this process's shared heap and maps, for reading, those of all others, by rank. The same
// on all ranks: none if one of them cannot, for example because a container hides processes from
// each other; operations then stage what they send. Every rank calls it.
absl::StatusOr<std::vector<Mapping>> MapPeerMemory(int rank, Rendezvous& rendezvous);

}  // namespace ebb::shared
