// One rank's end of a communicator between ranks that share memory, threads or processes.
//
// Large operations read the other ranks' memory in place: each rank publishes its call, all meet,
// each reads what it needs straight from the others' memory, and all meet again. After that the
// buffers are their owners' again.
//
//   rank 0   publish --+-- read others --+-- done
//   rank 1   publish --+-- read others --+-- done
//
// Small operations are staged through slots (ring.h), which saves a meeting and costs a copy. So
// are operations on memory that other processes cannot read (memory not from World::Allocate).
#pragma once

#include <memory>

#include "ebb/runtime/comm/shared/group.h"
#include "ebb/runtime/comm/shared/ring.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/staged.h"
#include "ebb/runtime/comm/task_communicator.h"
#include "ebb/runtime/comm/transfer.h"

namespace ebb {

class SharedCommunicator : public TaskCommunicator {
 public:
  SharedCommunicator(std::shared_ptr<SharedWorld> world, SharedGroup::Place place);
  // Waits for what was enqueued, then leaves.
  ~SharedCommunicator() override;

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  absl::Status status() const override { return group_.status(); }
  void Abort(absl::Status why) override { group_.Abort(why); }

 protected:
  void Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) override;
  bool failed() override { return group_.failed(); }
  void FailBehindAnother(const Collective& call) override;

 private:
  bool RunNow(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool RunExchange(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool RunDirect(const Collective& call, uint64_t meeting, WaitPoint::Deadline deadline,
                 ThreadTeam& team);
  // What the others need to know of `call`, for `meeting`: where its memory lies, if they can read
  // it.
  shared::RankRecord::Call Publish(const Collective& call, uint64_t meeting);
  // The memory of a span that `rank` has published.
  CollectiveSpan SpanOf(int rank, const shared::RankRecord::Call& published, uint64_t meeting,
                        size_t span) const;

  const std::shared_ptr<SharedWorld> world_;
  SharedGroup group_;
  SharedRing ring_;
  StagedOperations staged_;
  Transfer transfer_;
};

}  // namespace ebb
