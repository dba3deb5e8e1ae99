// What the processes of a host open of each other: the file of pages that all share, which rank 0
// makes, and the heap of each.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/shared/shared_file.h"

namespace ebb::shared {

// Rank 0's file, after `fill` has run on it there, open on all ranks. It has no name, so that no
// file stays behind even if all ranks are killed. If ranks may not look into each other's processes
// it has a name while this function runs. Every rank calls it.
absl::StatusOr<SharedFile> ShareFile(int rank, Rendezvous& rendezvous,
                                     absl::FunctionRef<absl::Status(SharedFile& file)> fill);

// The name that the file then has.
std::string SharedFileName(const Rendezvous& rendezvous);

// Installs this process's shared heap and maps the heaps of all other ranks for reading, by rank.
// The same on all ranks: empty if one of them cannot map, for example because a container hides
// processes from each other. Operations are then staged. Every rank calls it.
absl::StatusOr<std::vector<Mapping>> MapPeerMemory(int rank, Rendezvous& rendezvous);

}  // namespace ebb::shared
