// Ranks on several hosts. They know each other's numbers and hosts, and exchange through the store
// what GPUs need to be connected (World::On). They have operations of their own only if MPI
// connects them (mpi/world.h).
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"

namespace ebb {

class HostsRank : public WorldBackend {
 public:
  static absl::StatusOr<std::shared_ptr<WorldBackend>> Form(int rank, Rendezvous rendezvous);
  explicit HostsRank(std::shared_ptr<StoreGroup> group);

  // kUnimplemented, on every rank and at once.
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override;
  void Fail(absl::Status why) override;
  CallOrder* calls() override;
  absl::StatusOr<std::shared_ptr<StoreGroup>> bootstrap() override { return group_; }

 protected:
  const std::shared_ptr<StoreGroup> group_;
};

}  // namespace ebb
