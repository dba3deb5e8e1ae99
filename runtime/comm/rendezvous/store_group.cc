#include "ebb/runtime/comm/rendezvous/store_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

std::vector<int> AllRanks(const Store& store) {
  std::vector<int> ranks(store.participants().size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

int PlaceOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

StoreGroup::StoreGroup(std::shared_ptr<Store> store)
    : StoreGroup(store, "world", AllRanks(*store)) {}

StoreGroup::StoreGroup(std::shared_ptr<Store> store, std::string name, std::vector<int> world_ranks)
    : store_(std::move(store)),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      rank_(PlaceOf(store_->rank(), world_ranks_)) {}

Store::Round StoreGroup::NextRound() {
  return {.name = absl::StrCat(name_, ".", rounds_++), .members = world_ranks_};
}

absl::StatusOr<std::vector<std::string>> StoreGroup::AllGather(std::string_view mine,
                                                               double timeout_seconds) {
  Store::Round round = NextRound();
  round.timeout_seconds = timeout_seconds;
  round.what = "to connect the ranks";
  EBB_ASSIGN_OR_RETURN(Store::Gathered gathered, store_->Gather(round, mine));
  if (gathered.outcome == Store::Gathered::Outcome::kAll) return std::move(gathered.texts);
  const std::string absent =
      absl::StrJoin(gathered.absent, ", ", [this](std::string* out, int rank) {
        absl::StrAppend(out, Describe(store_->participants()[static_cast<size_t>(rank)]));
      });
  store_->Fail(gathered.outcome == Store::Gathered::Outcome::kLeft
                   ? absl::UnavailableError(absl::StrCat(
                         absent, " has left: its world was destroyed, or its process ends"))
                   : absl::DeadlineExceededError(
                         absl::StrCat("the ranks have waited ", timeout_seconds, " s for ", absent,
                                      " while all ranks exchange their addresses")));
  return store_->status();
}

absl::StatusOr<std::shared_ptr<StoreGroup>> StoreGroup::Form(const Proposal& proposal) {
  const CommunicatorOptions& wanted = proposal.options;
  Store::Round round = NextRound();
  round.timeout_seconds = CreationSeconds(wanted);
  round.notices = wanted.notices;
  round.what = absl::StrCat("to create communicator '", wanted.name, "'");
  EBB_ASSIGN_OR_RETURN(Store::Gathered gathered, store_->Gather(round, Pack(proposal)));
  if (gathered.outcome == Store::Gathered::Outcome::kLate)
    return LateCreationStatus(wanted, RankNames(gathered.absent));
  if (gathered.outcome == Store::Gathered::Outcome::kLeft)
    return LeftBeforeCreationStatus(gathered.absent[0], "its communicator or World was destroyed");
  std::vector<Proposal> proposals;
  for (const std::string& packed : gathered.texts) proposals.push_back(UnpackProposal(packed));
  EBB_ASSIGN_OR_RETURN(const std::vector<size_t> members,
                       FormGroup(world_ranks_, proposals, static_cast<size_t>(rank_)));
  std::vector<int> ranks;
  for (const size_t member : members) ranks.push_back(world_ranks_[member]);
  std::string name = absl::StrCat(gathered.number, ":", ranks[0]);
  auto formed = std::make_shared<StoreGroup>(store_, std::move(name), std::move(ranks));
  formed->number_ = gathered.number;
  return formed;
}

}  // namespace ebb
