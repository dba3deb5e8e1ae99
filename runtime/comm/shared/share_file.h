// The file of pages that the ranks of a host share: rank 0 makes it, and all open it.
#pragma once

#include <string>

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

}  // namespace ebb::shared
