// A world of ranks on several hosts. They meet through MPI, which only says where rank 0 listens.
// From then on they use the store (rendezvous/store.h), and move elements through MPI.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/rendezvous/hosts_rank.h"
#include "ebb/runtime/comm/rendezvous/store.h"

namespace ebb {

class MpiCommunicator;

struct MpiWorldOptions {
  OpenMpi::Comm ranks = nullptr;  // null: all that MPI has
  double timeout_seconds = 600;
  // Ranks with different texts count as on different hosts. For tests.
  std::string host = {};
  std::string launcher = "MPI";
};

class MpiWorld {
 public:
  static constexpr int kTags = 2;  // for each communicator
  // All ranks call it.
  static absl::StatusOr<std::shared_ptr<MpiWorld>> Form(const MpiWorldOptions& options);
  // For ranks that have met.
  static absl::StatusOr<std::shared_ptr<MpiWorld>> Hold(std::unique_ptr<MpiEndpoint> endpoint,
                                                        Rendezvous rendezvous);
  ~MpiWorld();

  int rank() const { return endpoint_->rank(); }
  int size() const { return endpoint_->size(); }
  MpiEndpoint& endpoint() { return *endpoint_; }
  Store& store() { return *store_; }
  const std::shared_ptr<Store>& shared_store() const { return store_; }

  // The first failure of the world stays.
  void Fail(const absl::Status& why);
  absl::Status status() const;

  // From Register on a communicator hears of its failure, its departures and the world's failure,
  // also of earlier ones.
  void Register(const std::string& name, MpiCommunicator& communicator);
  void Forget(const std::string& name);
  // MPI's messages may overtake the notices that a rank has sent before through the store. So a
  // message carries how many failures its sender has counted. The receiver reads it only after that
  // many failures of the sender have come, or once no more can come.
  void CountFailure() { told_.fetch_add(1); }
  void TellFailure(const std::string& name, const absl::Status& why);
  void TellDeparture(const std::string& name, int size, std::string_view departure);
  uint64_t told() const { return told_.load(); }
  bool HasHeard(int rank, uint64_t told) const;

 private:
  // What is known of a communicator, from the first notice of it until all of its ranks have left
  // it.
  struct Known {
    MpiCommunicator* here = nullptr;
    bool has_left = false;           // this rank
    std::vector<std::string> early;  // notes from before this rank joined it
    int departed = 0;
  };

  explicit MpiWorld(std::unique_ptr<MpiEndpoint> endpoint);
  // Handles what the store hears.
  void FailHere(const absl::Status& why);
  void Hear(std::string_view note);
  void Depart(const std::string& name, int size);

  const std::unique_ptr<MpiEndpoint> endpoint_;
  std::shared_ptr<Store> store_;
  mutable std::mutex mutex_;
  absl::Status status_;
  std::map<std::string, Known> communicators_;
  std::atomic<uint64_t> told_{0};
  std::vector<uint64_t> heard_;  // by rank
};

// One rank's handle.
class MpiRank : public HostsRank {
 public:
  explicit MpiRank(std::shared_ptr<MpiWorld> world)
      : MpiRank(world, std::make_shared<StoreGroup>(world->shared_store())) {}
  MpiRank(std::shared_ptr<MpiWorld> world, std::shared_ptr<StoreGroup> ranks)
      : HostsRank(std::move(ranks)), world_(std::move(world)) {}

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override;
  void Fail(absl::Status why) override;

 private:
  const std::shared_ptr<MpiWorld> world_;
};

}  // namespace ebb
