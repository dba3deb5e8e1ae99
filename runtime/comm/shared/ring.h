// Steps of staged operations through slots in memory that the ranks share: in step s a rank fills a slot of its own for
// the others, comes to a meeting, and reads what they have filled one step before:
//
//   rank 0   fill 0 | fill 1  read 0 | fill 2  read 1 | ...
//   rank 1   fill 0 | fill 1  read 0 | fill 2  read 1 | ...
//
// A rank's four slots take turns with its meetings. It fills one when it has waited for all but its last meeting, which
// the others come to after they have read what the slot held before.
#pragma once

#include <cstdint>

#include "ebb/runtime/comm/shared/group.h"
#include "ebb/runtime/comm/staged.h"

namespace ebb {

class SharedRing : public StepChannel {
 public:
  explicit SharedRing(SharedGroup& group) : group_(group) {}

  // What the next operation is, and whether all are known to have called the same already.
  void Begin(const CallSummary& call, bool is_checked) {
    call_ = &call;
    is_checked_ = is_checked;
  }

  int64_t slot_bytes(bool same_for_all) const override;
  bool Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline) override;
  const std::byte* Received(int peer, int64_t step) const override;

 private:
  bool RunExchange(const Load& load, int peer, bool sends, WaitPoint::Deadline deadline);

  SharedGroup& group_;
  const CallSummary* call_ = nullptr;
  bool is_checked_ = false;
  bool same_for_all_ = false;
  bool exchanges_ = false;
  uint64_t first_ = 0;  // meeting of the operation
};

}  // namespace ebb
