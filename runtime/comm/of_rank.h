// Errors under the names of ranks.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// "rank 1: ...", with the code and the payloads of `why`. A rank passes on the errors of other
// ranks: a message stays as it is if it, or what follows a colon in it, begins with a rank ("in step
// 3: rank 2 (process 7 on host 'a') has died") or with several ("ranks ...", "the ranks ..."). So an
// error names one rank. OK becomes kAborted.
absl::Status OfRank(int world_rank, const absl::Status& why);
// `rank_name`: World::RankName's.
absl::Status OfRank(std::string_view rank_name, const absl::Status& why);

}  // namespace ebb
