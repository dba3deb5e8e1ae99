// What a communicator's Status says when a rank fails the others: one wording for all backends.
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

// "rank 1", or "rank 1 (world rank 5)". `world_ranks`: of the communicator's members, in their
// order.
std::string RankName(std::span<const int> world_ranks, int rank);
// The same for several: "rank 1, rank 2 (world rank 5)".
std::string RankNames(std::span<const int> world_ranks, std::span<const int> ranks);
// For ranks of the world: "rank 1, rank 5".
std::string RankNames(std::span<const int> world_ranks);
// The ranks in the world of these ranks of a communicator.
std::vector<int> WorldRanksOf(std::span<const int> world_ranks, std::span<const int> ranks);

// One of the ranks that wait in a call of `kind` for `absent` logs it: the first one that has come,
// or in an exchange the one that waits.
bool LogsFor(CollectiveKind kind, int rank, std::span<const int> absent);

// What a rank waits for: "for rank 1 in barrier on communicator 'reduce'".
std::string WaitsInCall(const CommunicatorOptions& options, const CallSummary& call,
                        std::string_view awaited);
std::string WaitsForCreation(const CommunicatorOptions& options, std::string_view awaited);

// kDeadlineExceeded: a rank has waited too long for others. `awaited` completes "has waited 5 s
// for ...". `more`: what else is known, or "".
absl::Status LateStatus(const CommunicatorOptions& options, std::string_view waiting,
                        const CallSummary& call, std::string_view awaited,
                        std::string_view more = {});
absl::Status LateCreationStatus(const CommunicatorOptions& options, std::string_view awaited);
// kUnavailable. `how` completes "rank 1 has left: ...".
absl::Status LeftStatus(const CommunicatorOptions& options, std::string_view rank,
                        std::string_view how);
absl::Status LeftBeforeCreationStatus(int world_rank, std::string_view how);
// kFailedPrecondition.
absl::Status MismatchStatus(const CommunicatorOptions& options, std::string_view first_rank,
                            const CallSummary& first, std::string_view second_rank,
                            const CallSummary& second);
// A rank's own decision to abort, as the other ranks see it.
absl::Status AbortStatus(const CommunicatorOptions& options, int world_rank,
                         const absl::Status& why);
absl::Status RankFailedStatus(int world_rank, const absl::Status& why);

}  // namespace ebb
