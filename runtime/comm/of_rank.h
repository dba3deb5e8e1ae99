// Errors under the names of ranks.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// "rank 1: ...", with the code and the payloads of `why`. A rank passes on the errors of other
// ranks: a message that begins with a rank ("rank 2: ...", "rank 2 (process 7 on host 'a') has died")
// or with several ("ranks ...", "the ranks ...") stays as it is, so an error names one rank. OK
// becomes kAborted.
absl::Status OfRank(int world_rank, const absl::Status& why);
// `rank_name`: World::RankName's.
absl::Status OfRank(std::string_view rank_name, const absl::Status& why);

}  // namespace ebb
