// Errors under the names of ranks.
#pragma once

#include "absl/status/status.h"

namespace ebb {

// "rank 1: ...", with the code and the payloads of `why`. A rank passes on the errors of other
// ranks: a message that begins with its rank's name ("rank 2: ...", "rank 2 failed: ...") or says
// how several ranks differ ("ranks ...") stays as it is. OK becomes kAborted.
absl::Status OfRank(int world_rank, const absl::Status& why);

}  // namespace ebb
