// CPU ranks on several hosts, started by Open MPI's launcher. They behave as communicator.h says.
// They meet through MPI, which only says where rank 0 listens, unless they have met before, at a
// place that all know. From then on they use the store
// (rendezvous/store.h), and every rank sends every other what it needs through MPI. Inside a host
// MPI's shared memory moves the bytes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/store.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"

namespace ebb {

struct MpiWorldOptions {
  OpenMpi::Comm ranks = nullptr;  // null: all that MPI has
  int rank = -1, size = -1;       // as the launcher says, if it does; MPI must agree
  double timeout_seconds = 600;
  // Ranks with different texts count as on different hosts. For tests.
  std::string host = {};
  std::string launcher = "MPI";
  std::shared_ptr<Rendezvous> met = nullptr;  // if the ranks have met already; taken
};

class MpiRank : public HostsRank {
 public:
  MpiRank(std::shared_ptr<MpiEndpoint> endpoint, std::shared_ptr<StoreGroup> ranks)
      : HostsRank(std::move(ranks)), endpoint_(std::move(endpoint)) {}

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override;

 private:
  const std::shared_ptr<MpiEndpoint> endpoint_;
};

// This process's rank. All ranks call it, and it waits for all of them until the time-out. A
// program that has initialised MPI itself must have asked for MPI_THREAD_MULTIPLE, and must end MPI
// after its worlds. Otherwise MPI is initialised here, and ended when the program exits.
absl::StatusOr<std::shared_ptr<WorldBackend>> NewMpiWorld(const MpiWorldOptions& options);

}  // namespace ebb
