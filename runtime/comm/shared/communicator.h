// One rank's end of a communicator between ranks that share memory, threads or processes.
//
// Large operations read the other ranks' memory in place: each rank publishes its call, all meet,
// each reads what it needs straight from the others' memory, and all meet again. After that the
// buffers are their owners' again.
//
//   rank 0   publish --+-- read others --+-- done
//   rank 1   publish --+-- read others --+-- done
//
// Small operations are staged through slots, which saves a meeting and costs a copy. So are
// operations on memory that other processes cannot read (memory not from World::Allocate). In step
// s a rank fills a slot of its own for the others, comes to a meeting, and reads the slots that
// they filled one step before:
//
//   rank 0   fill 0 | fill 1  read 0 | fill 2  read 1 | ...
//   rank 1   fill 0 | fill 1  read 0 | fill 2  read 1 | ...
//
// A rank fills its four slots in turn, one for each meeting. It fills a slot once it has waited for
// all meetings but its last one, because the others come to those after they have read the slot's
// old contents.
#pragma once

#include <memory>

#include "ebb/runtime/comm/shared/group.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/task_communicator.h"

namespace ebb {

class SharedCommunicator : public TaskCommunicator {
 public:
  SharedCommunicator(std::shared_ptr<SharedWorld> world, SharedGroup::Place place);
  // Waits for what was enqueued, then leaves.
  ~SharedCommunicator() override;

  absl::Status status() const override { return group_.status(); }
  void Abort(absl::Status why) override { group_.Abort(why); }

 protected:
  void Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) override;
  bool failed() override { return group_.failed(); }
  void Fail(const absl::Status& why) override { group_.Fail(why); }
  int64_t slot_bytes(bool same_for_all) const override;
  bool RunSteps(const StagedMovement& movement, WaitPoint::Deadline deadline) override;

 private:
  bool RunNow(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool RunExchange(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool RunDirect(const Collective& call, uint64_t meeting, WaitPoint::Deadline deadline,
                 ThreadTeam& team);
  bool RunStepsOfExchange(const StagedMovement& movement, WaitPoint::Deadline deadline);
  // Tells the other ranks where the memory of `call` lies, if they can read it, for `meeting`.
  shared::RankRecord::Call Publish(const Collective& call, uint64_t meeting);
  // The memory of a span that `rank` has published.
  CollectiveSpan SpanOf(int rank, const shared::RankRecord::Call& published, uint64_t meeting,
                        size_t span) const;

  const std::shared_ptr<SharedWorld> world_;
  SharedGroup group_;
  // The staged operation: its summary for the others, and whether all ranks are known to have made
  // the same call.
  CallSummary summary_;
  bool is_checked_ = false;
};

}  // namespace ebb
