// Whether all ranks see one folder. Hosts may have folders of their own under one name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/checkpoint/folder_lock.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb {

// Rank 0 writes a file with a random name into the folder, which exists there, and all ranks look
// for the file. Collective. kFailedPrecondition names the ranks and hosts that do not see it, and
// is the same on all ranks. `own`: this rank's error before the call, which becomes every rank's.
// `call`: for messages.
//
// A host that has a network file system keeps attributes and missing names in its cache. No host
// has looked for the random name before, so its answer does not come from there.
//
// `lock`: rank 0's, of the folder. It remembers that the ranks have seen the folder, and they do not
// look again: a late answer of a network file system would end a run in the middle of training.
absl::Status CheckCommonFolder(Engine& engine, const std::string& folder, FolderLock* lock,
                               absl::Status own, std::string_view call);

// "rank 1 on host 'b'", "ranks 2 to 5 on host 'c'". `hosts`: by rank; empty: the rank is left out.
std::string RanksOnHosts(const std::vector<std::string>& hosts);

}  // namespace ebb
