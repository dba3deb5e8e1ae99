#include "ebb/runtime/comm/rendezvous/store_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"

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

WorldRank RankOf(const StoreGroup& group) {
  std::vector<Participant> participants;
  for (const int rank : group.world_ranks())
    participants.push_back(group.store().participants()[rank]);
  const Hosts hosts = FindHosts(participants);
  const std::vector<int>& here = hosts.With(group.rank());
  return {.rank = group.rank(),
          .size = group.size(),
          .local_rank = PlaceOf(group.rank(), here),
          .local_size = static_cast<int>(here.size()),
          .ranks_per_host = hosts.is_even ? hosts.ranks_per_host() : group.size(),
          .whole_size = static_cast<int>(group.store().participants().size()),
          .world_ranks = group.world_ranks()};
}

}  // namespace

std::vector<std::string> StoreGroup::hosts() const {
  std::vector<std::string> names;
  for (const int rank : world_ranks_) names.push_back(store_->participants()[rank].host_name);
  return names;
}

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
        absl::StrAppend(out, Describe(store_->participants()[rank]));
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
    return LateCreationStatus(wanted, NamesAndHosts(store_->participants(), gathered.absent));
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

HostsRank::HostsRank(std::shared_ptr<StoreGroup> group)
    : WorldBackend(RankOf(*group)), group_(std::move(group)) {}

absl::StatusOr<std::shared_ptr<WorldBackend>> HostsRank::Form(int rank, Rendezvous rendezvous) {
  const double seconds = rendezvous.timeout_seconds();
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                       Store::Hold(rank, std::move(rendezvous), seconds));
  return std::make_shared<HostsRank>(std::make_shared<StoreGroup>(std::move(store)));
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> HostsRank::NewCommunicator(
    const CommunicatorOptions&) {
  return CpuRanksNeedMpi(group_->store().participants());
}

absl::StatusOr<std::shared_ptr<WorldBackend>> HostsRank::Split(const Proposal& proposal) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> part, group_->Form(proposal));
  return std::make_shared<HostsRank>(std::move(part));
}

void HostsRank::Fail(absl::Status why) {
  group_->store().Fail(RankFailedStatus(me().RankName(me().rank), why));
}

// A part of a world makes its calls in an order of its own.
CallOrder* HostsRank::calls() {
  Store& store = group_->store();
  return group_->world_ranks().size() == store.participants().size() ? store.calls() : nullptr;
}

}  // namespace ebb
