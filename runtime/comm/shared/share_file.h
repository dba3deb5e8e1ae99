// The file whose pages the ranks of a host share, from rank 0's making it until all have it open.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/shared/shared_file.h"

namespace ebb::shared {

// Rank 0's file, after `fill` has run on it there, open on all ranks. It has no name, so that
// nothing stays behind even if all ranks are killed; only where ranks may not look into each other's
// processes it has one while this runs. Every rank calls it.
absl::StatusOr<SharedFile> ShareFile(int rank, Rendezvous& rendezvous,
                                     absl::FunctionRef<absl::Status(SharedFile& file)> fill);

// That name.
std::string SharedFileName(const Rendezvous& rendezvous);

}  // namespace ebb::shared
