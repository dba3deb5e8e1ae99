#include "ebb/runtime/engine/steps/suspension.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {

absl::Status Suspension::Error() const {
  if (with_.errors->has_failed()) return with_.errors->Report();
  return absl::FailedPreconditionError(
      absl::StrCat("the engine '", with_.inputs->options.name,
                   "' is suspended: call Resume before BeginStep and BeginEvaluation"));
}

// If the device fails under the copies, or a rank does not come here, the engine has failed for
// good: its pools are elsewhere by then.
absl::Status Suspension::MovePools(Storage::Room room) {
  absl::Status moved = with_.storage->MoveInto(std::move(room), with_.streams->gather());
  const absl::Status met =
      with_.communicators->BarrierAfterFreedMemory();  // communicators that failed, too
  if (moved.ok()) moved = met;
  if (!moved.ok()) with_.errors->Fail(moved);
  return moved;
}

absl::Status Suspension::Suspend() {
  with_.calls->Note(CallKind::kSuspend);
  const absl::Status settled = with_.outcome->AwaitVerdicts();
  with_.runner->AwaitState();
  Storage::Room room;
  absl::Status made = settled;
  if (made.ok() && !suspended_) made = with_.storage->MakeRoom(Tier::kCpu, room);
  EBB_RETURN_IF_ERROR(with_.barrier->Enter(CallKind::kSuspend, /*subject=*/0, made));
  if (suspended_) return absl::OkStatus();
  with_.pools->Deregister();
  suspended_ = true;  // also if it fails: no scope leads to where the pools have been
  return MovePools(std::move(room));
}

absl::Status Suspension::Resume() {
  with_.calls->Note(CallKind::kResume);
  const absl::Status settled = with_.outcome->AwaitVerdicts();
  Storage::Room room;
  absl::Status made = settled;
  if (made.ok() && suspended_) made = with_.storage->MakeRoom(Tier::kDevice, room);
  EBB_RETURN_IF_ERROR(with_.barrier->Enter(CallKind::kResume, /*subject=*/0, made));
  if (!suspended_) return absl::OkStatus();
  if (const absl::Status moved = MovePools(std::move(room)); !moved.ok()) {
    with_.peers->Abort(moved);  // the others are about to register their pools
    return moved;
  }
  with_.plans->PointAll();
  EBB_RETURN_IF_ERROR(with_.pools->Show(*with_.storage, with_.plans->plan().pools));
  suspended_ = has_refused_step_ = false;
  return absl::OkStatus();
}

}  // namespace ebb
