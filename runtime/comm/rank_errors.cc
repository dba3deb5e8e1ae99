#include "ebb/runtime/comm/rank_errors.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "ebb/runtime/comm/wait_notice.h"
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

std::vector<int> Members::OfWorld(std::span<const int> ranks) const {
  std::vector<int> of_world;
  for (const int of : ranks) of_world.push_back(world_rank(of));
  return of_world;
}

std::string Members::Name(int of) const {
  return world_rank(of) == of ? absl::StrCat("rank ", of)
                              : absl::StrCat("rank ", of, " (world rank ", world_rank(of), ")");
}

std::string Members::Names(std::span<const int> ranks) const {
  return absl::StrJoin(ranks, ", ", [this](std::string* out, int of) { *out += Name(of); });
}

bool Members::Logs(CollectiveKind kind, std::span<const int> absent) const {
  if (IsPointToPoint(kind)) return true;
  for (int first = 0; first < rank; ++first) {
    if (std::find(absent.begin(), absent.end(), first) == absent.end()) return false;
  }
  return true;
}

std::string Members::Waits(const CallSummary& call, std::string_view awaited) const {
  return absl::StrCat("for ", NameView(awaited), " in ", Describe(call), " on communicator '",
                      options.name, "'");
}

void Members::LogWait(double seconds, const CallSummary& call, std::string_view awaited,
                      std::string_view more) const {
  LogWaiting(Me(), seconds, Waits(call, awaited), options.timeout_seconds, more);
}

absl::Status Members::Late(const CallSummary& call, std::string_view awaited,
                           std::string_view more) const {
  return absl::DeadlineExceededError(absl::StrCat(Me(), " has waited ", options.timeout_seconds,
                                                  " s ", Waits(call, awaited),
                                                  more.empty() ? "" : ": ", NameView(more)));
}

absl::Status Members::Left(std::string_view name, std::string_view how) const {
  return absl::UnavailableError(
      absl::StrCat(NameView(name), " has left communicator '", options.name, "': ", NameView(how)));
}

absl::Status Members::Mismatch(int first, const CallSummary& first_call, int second,
                               const CallSummary& second_call) const {
  return absl::FailedPreconditionError(
      absl::StrCat("ranks called different operations on communicator '", options.name,
                   "': ", DescribeMismatch(Name(first), first_call, Name(second), second_call),
                   ". Every rank has to call the same operations in the same order"));
}

absl::Status Members::Aborted(const absl::Status& why) const {
  if (NamesItsRank(why)) return why;
  return absl::Status(
      CodeOf(why), absl::StrCat("rank ", world_rank(rank), " aborted communicator '", options.name,
                                "': ", MessageOf(why)));
}

std::string RankNames(std::span<const int> world_ranks) {
  return absl::StrJoin(world_ranks, ", ",
                       [](std::string* out, int rank) { absl::StrAppend(out, "rank ", rank); });
}

absl::Status LateCreationStatus(const CommunicatorOptions& options, std::string_view awaited) {
  return absl::DeadlineExceededError(absl::StrCat("creating communicator '", options.name,
                                                  "' has waited ", options.timeout_seconds,
                                                  " s for ", NameView(awaited)));
}

absl::Status LeftBeforeCreationStatus(int world_rank, std::string_view how) {
  return absl::UnavailableError(absl::StrCat("rank ", world_rank, " has left: ", NameView(how)));
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
