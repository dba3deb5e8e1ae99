// Nothing: what the host touches beside the device is of interest to programs that check the order of
// what is enqueued, which define these functions themselves (tests/cuda/stand_in/engine_touches.cc).
// So this file has nothing else.
#include "ebb/runtime/engine/executor.h"

namespace ebb {

void Executor::NoteVerdict(VerdictTouch, int) {}

}  // namespace ebb
