// One rank's end of a `local` communicator: runs its operations, each as a task of the stream it
// was enqueued on.
#pragma once

#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/local/member.h"
#include "ebb/runtime/comm/mover.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class LocalCommunicator : public LocalMember {
 public:
  LocalCommunicator(std::shared_ptr<LocalWorld> world, Formation::Place place);
  // Waits for what was enqueued, then leaves.
  ~LocalCommunicator() override;

  absl::Status Enqueue(Stream& stream, const Collective& call) override;

 private:
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Join(Formation::Place place) override;
  void Run(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team);
  bool RunCollective(WaitPoint::Deadline deadline, Mover& mover);
  bool RunExchange(WaitPoint::Deadline deadline, Mover& mover);

  Transfer transfer_;
};

}  // namespace ebb
