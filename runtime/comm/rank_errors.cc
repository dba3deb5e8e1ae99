#include "ebb/runtime/comm/rank_errors.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "ebb/runtime/config/name_view.h"

namespace ebb {
namespace {

// An OK status is no reason to give up, so it is not passed on.
absl::StatusCode CodeOf(const absl::Status& why) {
  return why.ok() ? absl::StatusCode::kAborted : why.code();
}
absl::string_view MessageOf(const absl::Status& why) {
  return why.ok() ? "for no stated reason" : why.message();
}

// "rank 2: ...", "rank 2 failed: ...", "ranks do different things: rank 1 ..."
bool NamesItsRank(const absl::Status& why) {
  absl::string_view text = why.message();
  if (absl::StartsWith(text, "ranks do different things")) return true;
  if (!absl::ConsumePrefix(&text, "rank ") || text.empty() || !absl::ascii_isdigit(text.front()))
    return false;
  while (!text.empty() && absl::ascii_isdigit(text.front())) text.remove_prefix(1);
  return absl::StartsWith(text, ": ") || absl::StartsWith(text, " failed: ");
}

}  // namespace

std::string RankName(std::span<const int> world_ranks, int rank) {
  const int world_rank = world_ranks[static_cast<size_t>(rank)];
  if (world_rank == rank) return absl::StrCat("rank ", rank);
  return absl::StrCat("rank ", rank, " (world rank ", world_rank, ")");
}

std::string RankNames(std::span<const int> world_ranks, std::span<const int> ranks) {
  return absl::StrJoin(ranks, ", ", [&](std::string* out, int rank) {
    absl::StrAppend(out, RankName(world_ranks, rank));
  });
}

std::string RankNames(std::span<const int> world_ranks) {
  return absl::StrJoin(world_ranks, ", ",
                       [](std::string* out, int rank) { absl::StrAppend(out, "rank ", rank); });
}

std::vector<int> WorldRanksOf(std::span<const int> world_ranks, std::span<const int> ranks) {
  std::vector<int> of_world;
  for (const int rank : ranks) of_world.push_back(world_ranks[static_cast<size_t>(rank)]);
  return of_world;
}

bool LogsFor(CollectiveKind kind, int rank, std::span<const int> absent) {
  if (IsPointToPoint(kind)) return true;
  for (int first = 0; first < rank; ++first) {
    if (std::find(absent.begin(), absent.end(), first) == absent.end()) return false;
  }
  return true;
}

std::string WaitsInCall(const CommunicatorOptions& options, const CallSummary& call,
                        std::string_view awaited) {
  return absl::StrCat("for ", NameView(awaited), " in ", Describe(call), " on communicator '",
                      options.name, "'");
}

std::string WaitsForCreation(const CommunicatorOptions& options, std::string_view awaited) {
  return absl::StrCat("for ", NameView(awaited), " to create communicator '", options.name, "'");
}

absl::Status LateStatus(const CommunicatorOptions& options, std::string_view waiting,
                        const CallSummary& call, std::string_view awaited, std::string_view more) {
  return absl::DeadlineExceededError(
      absl::StrCat(NameView(waiting), " has waited ", options.timeout_seconds, " s ",
                   WaitsInCall(options, call, awaited), more.empty() ? "" : ": ", NameView(more)));
}

absl::Status LateCreationStatus(const CommunicatorOptions& options, std::string_view awaited) {
  return absl::DeadlineExceededError(absl::StrCat("creating communicator '", options.name,
                                                  "' has waited ", options.timeout_seconds,
                                                  " s for ", NameView(awaited)));
}

absl::Status LeftStatus(const CommunicatorOptions& options, std::string_view rank,
                        std::string_view how) {
  return absl::UnavailableError(
      absl::StrCat(NameView(rank), " has left communicator '", options.name, "': ", NameView(how)));
}

absl::Status LeftBeforeCreationStatus(int world_rank, std::string_view how) {
  return absl::UnavailableError(absl::StrCat("rank ", world_rank, " has left: ", NameView(how)));
}

absl::Status MismatchStatus(const CommunicatorOptions& options, std::string_view first_rank,
                            const CallSummary& first, std::string_view second_rank,
                            const CallSummary& second) {
  return absl::FailedPreconditionError(
      absl::StrCat("ranks called different operations on communicator '", options.name,
                   "': ", DescribeMismatch(first_rank, first, second_rank, second),
                   ". Every rank has to call the same operations in the same order"));
}

absl::Status AbortStatus(const CommunicatorOptions& options, int world_rank,
                         const absl::Status& why) {
  if (NamesItsRank(why)) return why;
  return absl::Status(CodeOf(why), absl::StrCat("rank ", world_rank, " aborted communicator '",
                                                options.name, "': ", MessageOf(why)));
}

absl::Status RankFailedStatus(int world_rank, const absl::Status& why) {
  if (NamesItsRank(why)) return why;
  return absl::Status(CodeOf(why), absl::StrCat("rank ", world_rank, " failed: ", MessageOf(why)));
}

absl::Status OfRank(int world_rank, const absl::Status& why) {
  if (NamesItsRank(why)) return why;
  absl::Status named(CodeOf(why), absl::StrCat("rank ", world_rank, ": ", MessageOf(why)));
  why.ForEachPayload(
      [&](absl::string_view type, const absl::Cord& payload) { named.SetPayload(type, payload); });
  return named;
}

}  // namespace ebb
