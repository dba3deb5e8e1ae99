#include "ebb/runtime/comm/rendezvous/store_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/packer.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
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

Hosts HostsOf(const StoreGroup& group) {
  std::vector<Participant> participants;
  for (const int rank : group.world_ranks())
    participants.push_back(group.store().participants()[static_cast<size_t>(rank)]);
  return FindHosts(participants);
}

}  // namespace

StoreGroup::StoreGroup(std::shared_ptr<Store> store, int world_rank)
    : StoreGroup(store, world_rank, 0, "world", AllRanks(*store)) {}

StoreGroup::StoreGroup(std::shared_ptr<Store> store, int world_rank, uint64_t number,
                       std::string name, std::vector<int> world_ranks)
    : store_(std::move(store)),
      world_rank_(world_rank),
      number_(number),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      rank_(PlaceOf(world_rank_, world_ranks_)) {}

CallOrder* StoreGroup::calls() const {
  return size() > 1 && size() == store_->size() ? store_->calls(world_rank_) : nullptr;
}

int StoreGroup::local_rank() const {
  return PlaceOf(rank_, HostsOf(*this).With(rank_));
}

int StoreGroup::local_size() const {
  return static_cast<int>(HostsOf(*this).With(rank_).size());
}

int StoreGroup::ranks_per_host() const {
  const Hosts hosts = HostsOf(*this);
  return hosts.is_even ? hosts.ranks_per_host() : size();
}

absl::StatusOr<Gathered> StoreGroup::Gather(Round round, std::string_view mine) {
  round.name = absl::StrCat(name_, ".", rounds_++);
  round.members = world_ranks_;
  return store_->Gather(world_rank_, round, mine);
}

absl::StatusOr<std::vector<std::string>> StoreGroup::AllGather(std::string_view mine,
                                                               double timeout_seconds) {
  EBB_ASSIGN_OR_RETURN(
      Gathered gathered,
      Gather({.timeout_seconds = timeout_seconds, .what = "to create a communicator"}, mine));
  if (gathered.outcome == Gathered::Outcome::kAll) return std::move(gathered.texts);
  constexpr size_t kNamed = 8;
  std::vector<std::string> names;
  for (const int rank : gathered.absent) {
    if (names.size() < kNamed)
      names.push_back(Describe(store_->participants()[static_cast<size_t>(rank)]));
  }
  std::string absent = absl::StrJoin(names, ", ");
  if (gathered.absent.size() > kNamed)
    absl::StrAppend(&absent, " and ", gathered.absent.size() - kNamed, " more");
  store_->Break(
      gathered.outcome == Gathered::Outcome::kLeft
          ? absl::UnavailableError(absl::StrCat(absent, " has left: ", gathered.how_left))
          : absl::DeadlineExceededError(absl::StrCat(
                "the ranks have waited ", timeout_seconds, " s for ", absent,
                ": not there where all ranks tell each other what a communicator needs")));
  return store_->status();
}

absl::StatusOr<std::shared_ptr<StoreGroup>> StoreGroup::Form(const Proposal& proposal,
                                                             int64_t memory) {
  const CommunicatorOptions& wanted = proposal.options;
  EBB_RETURN_IF_ERROR(left_);
  EBB_ASSIGN_OR_RETURN(const Gathered gathered,
                       Gather({.timeout_seconds = CreationSeconds(wanted),
                               .notices = wanted.notices,
                               .what = absl::StrCat("to create communicator '", wanted.name, "'")},
                              Packer().Add(Pack(proposal), memory).Take()));
  if (gathered.outcome == Gathered::Outcome::kLate)
    return LateCreationStatus(wanted, RankNames(gathered.absent));
  if (gathered.outcome == Gathered::Outcome::kLeft) {
    store_->NoteFailure(gathered.absent[0]);
    left_ = LeftBeforeCreationStatus(gathered.absent[0], gathered.how_left);
    return left_;
  }
  std::vector<Proposal> proposals;
  std::vector<int64_t> offered;
  for (const std::string& text : gathered.texts) {
    std::string packed;
    Unpacker(text).Read(packed, offered.emplace_back());
    proposals.push_back(UnpackProposal(packed));
  }
  EBB_ASSIGN_OR_RETURN(const auto groups, FormGroups(world_ranks_, proposals));
  const auto& members = *std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
    return std::find(group.begin(), group.end(), static_cast<size_t>(rank_)) != group.end();
  });
  std::vector<int> ranks;
  for (const size_t member : members) ranks.push_back(world_ranks_[member]);
  std::string name = absl::StrCat(gathered.number, ":", ranks[0]);
  std::shared_ptr<StoreGroup> formed(
      new StoreGroup(store_, world_rank_, gathered.number, std::move(name), std::move(ranks)));
  formed->memory_ = offered[members[0]];
  return formed;
}

void StoreGroup::Leave() {
  store_->LeaveRound(world_rank_,
                     {.name = absl::StrCat(name_, ".", rounds_), .members = world_ranks_});
}

}  // namespace ebb
