// Suspend and Resume: the pools go to the host and come back, on all ranks or on none.
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

absl::Status Executor::Suspended() {
  if (errors_.has_failed()) return errors_.Tell();
  return absl::FailedPreconditionError(
      absl::StrCat("the engine '", options_.name,
                   "' is suspended: call Resume before BeginStep and BeginEvaluation"));
}

// An engine whose device fails under the copies, or whose ranks do not all come here, has failed for
// good: its pools are elsewhere by then.
absl::Status Executor::MovePools(Storage::Room room) {
  absl::Status moved = storage_->MoveInto(std::move(room), *gather_);
  if (world_.connected_by_nccl()) {
    // Memory has been given back. Those that failed come, too.
    const absl::Status met = given_world_.MeetOnHost(OptionsOf("moved"));
    if (moved.ok()) moved = met;
  }
  if (!moved.ok()) errors_.Fail(moved);
  return moved;
}

absl::Status Executor::Suspend() {
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        "Suspend while a Step or Evaluation of the engine is alive: finish or drop it first");
  }
  calls_.Note(CallKind::kSuspend);
  const absl::Status settled = Settle();
  AwaitState();
  Storage::Room room;
  absl::Status made = settled;
  if (made.ok() && !suspended_) made = storage_->MakeRoom(Tier::kCpu, room);
  EBB_RETURN_IF_ERROR(Meet(Meeting::kSuspend, /*subject=*/0, made));
  if (suspended_) return absl::OkStatus();
  DeregisterPools();
  suspended_ = true;  // also if it fails: no scope leads to where the pools have been
  return MovePools(std::move(room));
}

absl::Status Executor::Resume() {
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        "Resume while a Step or Evaluation of the engine is alive, which shows that it is not "
        "suspended");
  }
  calls_.Note(CallKind::kResume);
  const absl::Status settled = Settle();
  Storage::Room room;
  absl::Status made = settled;
  if (made.ok() && suspended_) made = storage_->MakeRoom(Tier::kDevice, room);
  EBB_RETURN_IF_ERROR(Meet(Meeting::kResume, /*subject=*/0, made));
  if (!suspended_) return absl::OkStatus();
  if (const absl::Status moved = MovePools(std::move(room)); !moved.ok()) {
    peers_.Abort(moved);  // the others are about to register their pools
    return moved;
  }
  PointAll();
  EBB_RETURN_IF_ERROR(ShowPools());
  suspended_ = refused_step_ = false;
  return absl::OkStatus();
}

}  // namespace ebb
