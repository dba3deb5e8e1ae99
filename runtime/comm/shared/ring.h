// Steps of staged operations through slots in memory that the ranks share: in step s a rank fills a
// slot of its own for the others, comes to a meeting, and reads the slots that they filled one step
// before:
//
//   rank 0   fill 0 | fill 1  read 0 | fill 2  read 1 | ...
//   rank 1   fill 0 | fill 1  read 0 | fill 2  read 1 | ...
//
// A rank fills its four slots in turn, one for each meeting. It fills a slot once it has waited for
// all meetings but its last one, because the others come to those after they have read the slot's
// old contents.
#pragma once

#include <cstdint>

#include "ebb/runtime/comm/shared/group.h"
#include "ebb/runtime/comm/staged.h"

namespace ebb {

class SharedRing : public StepChannel {
 public:
  explicit SharedRing(SharedGroup& group) : group_(group) {}

  // `call`: the next operation. `is_checked`: all ranks are known to have made the same call.
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
  uint64_t first_ = 0;  // first meeting of the operation
};

}  // namespace ebb
