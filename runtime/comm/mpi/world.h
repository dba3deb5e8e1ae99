// A world of ranks on several hosts: they meet through MPI, which only tells all where rank 0 listens, hold the store
// (rendezvous/store.h) from then on, and move elements through MPI.
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
  MPI_Comm ranks = MPI_COMM_WORLD;
  double timeout_seconds = 600;
  // Ranks with different texts count as on different hosts, wherever they are; for tests.
  std::string host = {};
  std::string launcher = "MPI";
};

class MpiWorld {
 public:
  static constexpr int kTags = 2;  // of a communicator
  // All ranks call it.
  static absl::StatusOr<std::shared_ptr<MpiWorld>> Form(const MpiWorldOptions& options);
  // Of ranks that have met.
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

  // Communicators hear of their failure, departures and the world's failure from Register on, and of what came before.
  void Register(const std::string& name, MpiCommunicator& communicator);
  void Forget(const std::string& name);
  // MPI's messages may overtake what a rank has told before through the store. So they carry how many failures their
  // sender has counted, and mean nothing before the receiver has heard so many of it, or can hear no more.
  void CountFailure() { told_.fetch_add(1); }
  void TellFailure(const std::string& name, const absl::Status& why);
  void TellDeparture(const std::string& name, int size, std::string_view departure);
  uint64_t told() const { return told_.load(); }
  bool HasHeard(int rank, uint64_t told) const;

 private:
  // What is known of each communicator from the first that is heard of it until all of its ranks have left it.
  struct Known {
    MpiCommunicator* here = nullptr;
    bool has_left = false;           // this rank
    std::vector<std::string> early;  // notes from before it was here
    int departed = 0;
  };

  explicit MpiWorld(std::unique_ptr<MpiEndpoint> endpoint);
  // Of what the store hears.
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
