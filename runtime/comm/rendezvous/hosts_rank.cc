#include "ebb/runtime/comm/rendezvous/hosts_rank.h"

#include <utility>

#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<std::shared_ptr<WorldBackend>> HostsRank::Form(int rank, Rendezvous rendezvous) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Store> store, Store::Hold(rank, std::move(rendezvous)));
  return std::make_shared<HostsRank>(std::move(store));
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> HostsRank::NewCommunicator(
    const CommunicatorOptions&) {
  return CpuRanksNeedMpi(store_->participants());
}

void HostsRank::Fail(absl::Status why) {
  store_->Fail(RankFailedStatus(rank(), why));
}

}  // namespace ebb
