// Ranks on several hosts that no MPI connects: they know each other's numbers and hosts and can tell each
// other so much as GPUs need to be connected (World::On), but have no operations of their own.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/hosts/hosts.h"
#include "ebb/runtime/comm/hosts/star.h"
#include "ebb/runtime/comm/nccl/bootstrap.h"

namespace ebb {

// By host name.
Hosts FindHosts(const std::vector<Participant>& participants);
// kUnimplemented; names the hosts.
absl::Status CpuRanksNeedMpi(const std::vector<Participant>& participants);

class HostsRank : public WorldBackend {
 public:
  static absl::StatusOr<std::shared_ptr<WorldBackend>> Form(int rank, Rendezvous rendezvous);
  ~HostsRank() override;

  int rank() const override;
  int size() const override;
  int local_rank() const override;
  int local_size() const override;
  int ranks_per_host() const override;
  // kUnimplemented, on every rank and at once.
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  void Fail(absl::Status why) override;
  CallOrder* calls() override;
  std::shared_ptr<Bootstrap> bootstrap() override;

 private:
  class StarBootstrap;
  explicit HostsRank(std::shared_ptr<StarBootstrap> bootstrap);

  const std::shared_ptr<StarBootstrap> bootstrap_;
};

}  // namespace ebb
