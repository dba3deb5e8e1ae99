#include "ebb/runtime/engine/steps/suspension.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"

namespace ebb {

absl::Status Suspension::Error() const {
  if (core_.errors.has_failed()) return core_.errors.Report();
  return absl::FailedPreconditionError(
      absl::StrCat("the engine '", core_.inputs.options.name,
                   "' is suspended: call Resume before BeginStep and BeginEvaluation"));
}

// If the device fails under the copies, or a rank does not come here, the engine has failed for
// good: its pools are elsewhere by then.
absl::Status Suspension::MovePools(Storage::Room room) {
  absl::Status moved = core_.storage.MoveInto(std::move(room), core_.streams.gather());
  const absl::Status met =
      core_.communicators.BarrierAfterFreedMemory();  // communicators that failed, too
  if (moved.ok()) moved = met;
  if (!moved.ok()) core_.errors.Fail(moved);
  return moved;
}

absl::Status Suspension::Suspend() {
  core_.calls.Note(CallKind::kSuspend);
  const absl::Status settled = outcome_.AwaitVerdicts();
  runner_.AwaitState();
  Storage::Room room;
  absl::Status made = settled;
  if (made.ok() && !suspended_) made = core_.storage.MakeRoom(Tier::kCpu, room);
  EBB_RETURN_IF_ERROR(barrier_.Enter(CallKind::kSuspend, /*subject=*/0, made));
  if (suspended_) return absl::OkStatus();
  pools_.Deregister();
  suspended_ = true;  // also if it fails: no scope leads to where the pools have been
  return MovePools(std::move(room));
}

absl::Status Suspension::Resume() {
  core_.calls.Note(CallKind::kResume);
  const absl::Status settled = outcome_.AwaitVerdicts();
  Storage::Room room;
  absl::Status made = settled;
  if (made.ok() && suspended_) made = core_.storage.MakeRoom(Tier::kDevice, room);
  EBB_RETURN_IF_ERROR(barrier_.Enter(CallKind::kResume, /*subject=*/0, made));
  if (!suspended_) return absl::OkStatus();
  if (const absl::Status moved = MovePools(std::move(room)); !moved.ok()) {
    peers_.Abort(moved);  // the others are about to register their pools
    return moved;
  }
  core_.plans.PointAll();
  EBB_RETURN_IF_ERROR(pools_.Show(core_.storage, core_.plans.plan().table));
  suspended_ = has_refused_step_ = false;
  return absl::OkStatus();
}

}  // namespace ebb
