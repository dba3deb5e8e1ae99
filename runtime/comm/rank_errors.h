// What a communicator's Status says when ranks fail each other, in one wording for all backends.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/of_rank.h"

namespace ebb {

// "rank 1", or "rank 1 (world rank 5)". `world_ranks`: of a communicator's members, in their order.
std::string RankName(std::span<const int> world_ranks, int rank);
// The same of several: "rank 1, rank 2 (world rank 5)".
std::string RankNames(std::span<const int> world_ranks, std::span<const int> ranks);
// Of ranks of the world: "rank 1, rank 5".
std::string RankNames(std::span<const int> world_ranks);
// Which ranks of the world these ranks of a communicator are.
std::vector<int> WorldRanksOf(std::span<const int> world_ranks, std::span<const int> ranks);

// Of the ranks that wait in a call of `kind` for `absent`, one says so in the log: the first of those that have
// come, and of two that exchange something the one that waits.
bool SpeaksFor(CollectiveKind kind, int rank, std::span<const int> absent);

// What a rank waits in: "for rank 1 in barrier on communicator 'reduce'".
std::string WaitsInCall(const CommunicatorOptions& options, const CallSummary& call,
                        std::string_view for_whom);
std::string WaitsForCreation(const CommunicatorOptions& options, std::string_view for_whom);

// kDeadlineExceeded: a rank has waited too long for others. `for_whom` completes "has waited 5 s
// for ...". `more`: what else is known, or "".
absl::Status LateStatus(const CommunicatorOptions& options, std::string_view waiting,
                        const CallSummary& call, std::string_view for_whom,
                        std::string_view more = {});
absl::Status LateCreationStatus(const CommunicatorOptions& options, std::string_view for_whom);
// kUnavailable. `how` completes "rank 1 has left: ...".
absl::Status LeftStatus(const CommunicatorOptions& options, std::string_view rank,
                        std::string_view how);
absl::Status LeftBeforeCreationStatus(int world_rank, std::string_view how);
// kFailedPrecondition.
absl::Status MismatchStatus(const CommunicatorOptions& options, std::string_view first_rank,
                            const CallSummary& first, std::string_view second_rank,
                            const CallSummary& second);
// A rank's own decision, as the others see it.
absl::Status AbortStatus(const CommunicatorOptions& options, int world_rank,
                         const absl::Status& why);
absl::Status RankFailedStatus(int world_rank, const absl::Status& why);

}  // namespace ebb
