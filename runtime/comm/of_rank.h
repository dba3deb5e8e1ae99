// Errors under the names of ranks.
#pragma once

#include "absl/status/status.h"

namespace ebb {

// "rank 1: ...", with the code and the payloads of `why`. A rank passes on what others have told it: what begins with
// its rank's name ("rank 2: ...", "rank 2 failed: ...") or says of several ranks how they differ ("ranks ...") is left
// as it is. Of OK it makes kAborted.
absl::Status OfRank(int world_rank, const absl::Status& why);

}  // namespace ebb
