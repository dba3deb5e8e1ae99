#include "ebb/runtime/comm/rank_errors.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {
namespace {

constexpr char kDifferentThings[] = "ranks do different things",
               kOpenedDifferent[] = "ranks opened different scopes";

// An OK status is no reason to give up, so it is not passed on.
absl::StatusCode CodeOf(const absl::Status& why) {
  return why.ok() ? absl::StatusCode::kAborted : why.code();
}
absl::string_view MessageOf(const absl::Status& why) {
  return why.ok() ? "for no stated reason" : why.message();
}

// "rank 2: ...", "rank 2 (process 7 on host 'a') has died", "ranks do different things: ...".
bool BeginsWithRank(absl::string_view text) {
  if (absl::StartsWith(text, "ranks ") || absl::StartsWith(text, "the ranks ")) return true;
  if (!absl::ConsumePrefix(&text, "rank ") || text.empty() || !absl::ascii_isdigit(text.front()))
    return false;
  while (!text.empty() && absl::ascii_isdigit(text.front())) text.remove_prefix(1);
  for (const absl::string_view next : {": ", " failed: ", " has ", " cannot ", " on host ",
                                       " (process ", " (world rank ", " (data rank "}) {
    if (absl::StartsWith(text, next)) return true;
  }
  return false;
}

// The place may come first: "in step 3, at the gather: rank 2 (process 7 on host 'a') has died".
bool NamesItsRank(const absl::Status& why) {
  absl::string_view text = why.message();
  for (;;) {
    if (BeginsWithRank(text)) return true;
    const size_t colon = text.find(": ");
    if (colon == absl::string_view::npos) return false;
    text.remove_prefix(colon + 2);
  }
}

}  // namespace

std::string PartRankName(int rank, int world_rank) {
  return world_rank == rank ? absl::StrCat("rank ", rank)
                            : absl::StrCat("rank ", rank, " (world rank ", world_rank, ")");
}

std::string WorldRank::RankName(int of) const {
  return PartRankName(of, world_ranks.empty() ? of : world_ranks[of]);
}

std::string NamesAndHosts(std::span<const NameAndHost> ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", ranks[i].name);
    const std::string& host = ranks[i].host;
    if (!host.empty() && (i + 1 == ranks.size() || ranks[i + 1].host != host))
      absl::StrAppend(&text, " on host '", host, "'");
  }
  return text;
}

std::vector<int> Members::OfWorld(std::span<const int> ranks) const {
  std::vector<int> of_world;
  for (const int of : ranks) of_world.push_back(world_rank(of));
  return of_world;
}

std::string Members::NamesAndHosts(std::span<const int> ranks) const {
  std::vector<NameAndHost> all;
  for (const int of : ranks) all.push_back({Name(of), hosts.empty() ? "" : hosts[of]});
  return ebb::NamesAndHosts(std::span<const NameAndHost>(all));
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
  LogWaiting(NamesAndHosts({&rank, 1}), seconds, Waits(call, awaited), options.timeout_seconds,
             more);
}

absl::Status Members::Late(const CallSummary& call, std::string_view awaited,
                           std::string_view more) const {
  return absl::DeadlineExceededError(
      absl::StrCat(NamesAndHosts({&rank, 1}), " has waited ", options.timeout_seconds, " s ",
                   Waits(call, awaited), more.empty() ? "" : ": ", NameView(more)));
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
  return absl::Status(CodeOf(why), absl::StrCat(Me(), " aborted communicator '", options.name,
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
  return RankFailedStatus(absl::StrCat("rank ", world_rank), why);
}

absl::Status RankFailedStatus(std::string_view rank_name, const absl::Status& why) {
  if (NamesItsRank(why)) return why;
  return absl::Status(CodeOf(why), absl::StrCat(NameView(rank_name), " failed: ", MessageOf(why)));
}

absl::Status OfRank(int world_rank, const absl::Status& why) {
  return OfRank(absl::StrCat("rank ", world_rank), why);
}

absl::Status OfRank(std::string_view rank_name, const absl::Status& why) {
  if (NamesItsRank(why)) return why;
  absl::Status named(CodeOf(why), absl::StrCat(NameView(rank_name), ": ", MessageOf(why)));
  why.ForEachPayload(
      [&](absl::string_view type, const absl::Cord& payload) { named.SetPayload(type, payload); });
  return named;
}

absl::Status DoDifferentThings(std::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(kDifferentThings, NameView(what)));
}

absl::Status OpenedDifferentScopes(int64_t number, std::string_view first, std::string_view its,
                                   std::string_view second, std::string_view others) {
  return absl::FailedPreconditionError(
      absl::StrCat(kOpenedDifferent, ": as number ", number, " of the step ", NameView(first),
                   " opened ", NameView(its), ", ", NameView(second), " ", NameView(others),
                   "; every rank must open the same scopes in the same order"));
}

bool IsDifference(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) &&
         (absl::StartsWith(status.message(), kOpenedDifferent) ||
          absl::StartsWith(status.message(), kDifferentThings));
}

}  // namespace ebb
