// A world of ranks on several hosts: which ranks share a host, what ranks tell each other outside of their
// calls, and the first failure, which is that of group 0, whose members are all ranks.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/hosts/hosts.h"
#include "ebb/runtime/comm/hosts/star.h"
#include "ebb/runtime/comm/mpi/notice.h"
#include "ebb/runtime/comm/mpi/port.h"
#include "ebb/runtime/comm/node/world.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"

namespace ebb {

class MpiGroup;

struct MpiWorldOptions {
  MPI_Comm ranks = MPI_COMM_WORLD;
  double timeout_seconds = 600;
  // Ranks with different texts count as on different hosts, wherever they are; for tests.
  std::string host;
  // Where the ranks connect by TCP, too, to hear of each other's end; its rank and size are MPI's.
  // Nothing: their launcher ends them all with one.
  std::optional<RendezvousOptions> meeting;
};

class MpiWorld {
 public:
  static constexpr size_t kProposalBytes = 512;

  // All ranks call it.
  static absl::StatusOr<std::shared_ptr<MpiWorld>> Form(const MpiWorldOptions& options);
  ~MpiWorld();

  int rank() const { return port_->rank(); }
  int size() const { return port_->size(); }
  int local_rank() const { return node_->rank(); }
  int local_size() const { return node_->size(); }
  const Hosts& hosts() const { return hosts_; }
  // "2 hosts (node1, node2) with 4 ranks each".
  std::string DescribeHosts() const;
  // By rank of a communicator.
  std::vector<int> HostsOf(std::span<const int> world_ranks) const;

  MpiPort& port() { return *port_; }
  MpiGroup& all() { return *all_; }
  int next_id() const { return next_id_.load(); }
  void UseId(int id) { next_id_.store(id + 1); }

  // Hears what others have told, and passes on what has failed on this host. Any thread; whoever
  // waits for others calls it again and again.
  void Poll();
  void Tell(int rank, const Notice& notice);

  CallOrder& calls() { return node_->calls(); }
  // This rank's calls, to the first rank of every other host.
  void TellCalls();
  // As NodeWorld's.
  std::string CompareCalls(std::span<const int> world_ranks);

  // Groups hear what is told to them from Register to Forget, and before if it has come before.
  void Register(MpiGroup& group);
  void Forget(MpiGroup& group);
  // All that connects this rank fails, with the world.
  void FailAllHere(const absl::Status& why);
  // The failure of the world, to all ranks, before this one's connections can close: else its end would
  // look like the cause. No more goes through MPI then. False: there is no star.
  bool TellStar(const absl::Status& why);

 private:
  struct Early {
    int from = 0;
    Notice notice;
  };
  MpiWorld(std::unique_ptr<MpiPort> port, std::vector<int> host_of,
           std::vector<std::string> host_names);
  static absl::StatusOr<std::shared_ptr<MpiWorld>> FormWith(MpiLibrary& library,
                                                            const MpiWorldOptions& options,
                                                            WaitPoint::Deadline deadline);
  absl::Status FormNode(const std::string& name, double timeout_seconds);
  // MPI does not tell that a process has died. All ranks do this, or, where not all can connect, none.
  absl::Status WatchOthers(RendezvousOptions meeting, double timeout_seconds);
  void Listen();
  void Deliver(int from, const Notice& notice);
  // Until what this rank has told is on its way.
  void Farewell();

  const std::unique_ptr<MpiPort> port_;
  const std::vector<int> host_of_;             // by rank
  const std::vector<std::string> host_names_;  // by rank
  const Hosts hosts_;
  std::shared_ptr<NodeWorld> node_;
  std::unique_ptr<MpiGroup> all_;
  std::shared_ptr<Star> star_;  // null: the end of others is not listened for
  std::atomic<int> next_id_{1};

  std::mutex hearing_;  // by one thread at a time
  const MessageMemory heard_;
  MpiMessage hears_;
  std::mutex telling_;
  std::vector<MpiMessage> told_;
  std::mutex groups_mutex_;
  std::map<int, MpiGroup*> groups_;
  std::vector<Early> early_;
  int newest_ = 0;  // group that has been registered
};

// One rank's handle.
class MpiRank : public WorldBackend {
 public:
  explicit MpiRank(std::shared_ptr<MpiWorld> world) : world_(std::move(world)) {}
  // Communicators go on; new ones are not waited for.
  ~MpiRank() override;

  int rank() const override { return world_->rank(); }
  int size() const override { return world_->size(); }
  int local_rank() const override { return world_->local_rank(); }
  int local_size() const override { return world_->local_size(); }
  int ranks_per_host() const override;
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override;
  void Fail(absl::Status why) override;
  CallOrder* calls() override;
  void TellCalls() override { world_->TellCalls(); }

 private:
  const std::shared_ptr<MpiWorld> world_;
};

}  // namespace ebb
