// Who am I, who else is there. A cheap, copyable handle; engines and their communicators are made
// from it.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/communicator.h"

namespace ebb {

class World {
 public:
  // The world that the launcher of this process describes. No launcher, or one of a single process:
  // a world of one rank. A launcher of several is refused with the reason: ranks of one world are
  // threads of one process here (RunThreads).
  static absl::StatusOr<World> FromEnvironment();
  // A world of one rank.
  static World Single();
  explicit World(std::shared_ptr<WorldBackend> backend) : backend_(std::move(backend)) {}

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }
  int local_rank() const { return backend_->local_rank(); }  // on this host
  int local_size() const { return backend_->local_size(); }

  // Collective: every rank calls it, in the same order, with the same options.
  absl::StatusOr<Communicator> NewCommunicator(const CommunicatorOptions& options = {}) const;

  // Every communicator of every rank fails with `why`; nobody waits for this rank any longer.
  void Fail(absl::Status why) const { backend_->Fail(std::move(why)); }

 private:
  std::shared_ptr<WorldBackend> backend_;
};

// Runs `body` as `ranks` threads of this process, each with its own World, and returns when all
// have ended: OK, or the error of the rank that failed first, prefixed with its number. A rank
// whose body has returned has left: others that still wait for it fail with a Status that names it.
absl::Status RunThreads(int ranks, std::function<absl::Status(World)> body);

}  // namespace ebb
