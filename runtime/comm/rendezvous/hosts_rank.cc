#include "ebb/runtime/comm/rendezvous/hosts_rank.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

WorldRank RankOf(const StoreGroup& group) {
  std::vector<Participant> participants;
  for (const int rank : group.world_ranks())
    participants.push_back(group.store().participants()[static_cast<size_t>(rank)]);
  const Hosts hosts = FindHosts(participants);
  const std::vector<int>& here = hosts.With(group.rank());
  return {.rank = group.rank(),
          .size = group.size(),
          .local_rank =
              static_cast<int>(std::find(here.begin(), here.end(), group.rank()) - here.begin()),
          .local_size = static_cast<int>(here.size()),
          .ranks_per_host = hosts.is_even ? hosts.ranks_per_host() : group.size()};
}

}  // namespace

HostsRank::HostsRank(std::shared_ptr<StoreGroup> group)
    : WorldBackend(RankOf(*group)), group_(std::move(group)) {}

absl::StatusOr<std::shared_ptr<WorldBackend>> HostsRank::Form(int rank, Rendezvous rendezvous) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store, Store::Hold(rank, std::move(rendezvous)));
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
  Store& store = group_->store();
  store.Fail(RankFailedStatus(store.rank(), why));
}

// A part of a world makes its calls in an order of its own.
CallOrder* HostsRank::calls() {
  Store& store = group_->store();
  return group_->world_ranks().size() == store.participants().size() ? store.calls() : nullptr;
}

}  // namespace ebb
