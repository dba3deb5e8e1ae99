// Statuses of ranks that fail the others: one wording for all backends.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/of_rank.h"

namespace ebb {

// "rank 1", or of a part whose ranks have other numbers in the world "rank 1 (world rank 5)".
std::string PartRankName(int rank, int world_rank);

// "rank 1, rank 5 on host 'b', rank 7 on host 'c'": a host is said after the last of its ranks.
// `host` is empty for threads.
struct NameAndHost {
  std::string name, host;
};
std::string NamesAndHosts(std::span<const NameAndHost> ranks);

// The ranks of a communicator. `awaited` completes "has waited 5 s for ...". `more`: what else is
// known, or "".
struct Members {
  CommunicatorOptions options;
  std::vector<int> world_ranks;
  int rank = 0;                         // this one
  std::vector<std::string> hosts = {};  // by rank; empty: the ranks are threads

  int size() const { return static_cast<int>(world_ranks.size()); }
  int world_rank(int of) const { return world_ranks[of]; }
  // The ranks in the world of these ranks.
  std::vector<int> OfWorld(std::span<const int> ranks) const;
  std::string Name(int of) const { return PartRankName(of, world_rank(of)); }
  std::string Me() const { return Name(rank); }
  // For lines about waits: "rank 1, rank 2 (world rank 5) on host 'b'".
  std::string NamesAndHosts(std::span<const int> ranks) const;

  // One of the ranks that wait in a call of `kind` for `absent` logs it: the first one that has
  // come, or in an exchange the one that waits.
  bool Logs(CollectiveKind kind, std::span<const int> absent) const;
  // The wait of this rank: "for rank 1 in barrier on communicator 'reduce'".
  std::string Waits(const CallSummary& call, std::string_view awaited) const;
  void LogWait(double seconds, const CallSummary& call, std::string_view awaited,
               std::string_view more) const;

  // kDeadlineExceeded: this rank has waited too long.
  absl::Status Late(const CallSummary& call, std::string_view awaited,
                    std::string_view more = {}) const;
  // kUnavailable. `how` completes "rank 1 has left: ...".
  absl::Status Left(std::string_view name, std::string_view how) const;
  // kFailedPrecondition.
  absl::Status Mismatch(int first, const CallSummary& first_call, int second,
                        const CallSummary& second_call) const;
  // This rank's own decision to abort, as the other ranks see it.
  absl::Status Aborted(const absl::Status& why) const;
};

// For ranks of the world: "rank 1, rank 5".
std::string RankNames(std::span<const int> world_ranks);

// Errors of ranks that form communicators.
absl::Status LateCreationStatus(const CommunicatorOptions& options, std::string_view awaited);
absl::Status LeftBeforeCreationStatus(int world_rank, std::string_view how);

absl::Status RankFailedStatus(int world_rank, const absl::Status& why);
// `rank_name`: World::RankName's.
absl::Status RankFailedStatus(std::string_view rank_name, const absl::Status& why);

// Two ranks that have done different things. `what`: after "ranks do different things".
absl::Status DoDifferentThings(std::string_view what);
// `number`: of the first different scope, from 1. `its`: "Forward('block')", "nothing more".
absl::Status OpenedDifferentScopes(int64_t number, std::string_view first, std::string_view its,
                                   std::string_view second, std::string_view others);
// Whether the status is one of these, and so names both ranks.
bool IsDifference(const absl::Status& status);

}  // namespace ebb
