#include "ebb/runtime/engine/ranks/step_communicators.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/watchdog.h"

namespace ebb {
namespace {

// How long ranks that have waited out the time-out wait for each other to learn why.
constexpr double kDifferenceSecondsMin = 2, kDifferenceOfTimeout = 0.05;

}  // namespace

void StepCommunicators::AwaitConclusion(int parity) {
  streams_.concluded(parity).Wait();
  // A failed device is not waited for. It may still write the verdict.
  if (!inputs_.device.status().ok()) streams_.reduce().WaitIdle();
}

void StepCommunicators::AwaitUpdates() {
  for (const sharding::StreamId id : {sharding::StreamId::kUpdate, sharding::StreamId::kHostUpdate})
    if (Stream* const updates = streams_.all()[sharding::LineOf(id)]) updates->WaitIdle();
}

// The first that was seen, since others fail in its wake.
absl::Status StepCommunicators::Broken() const {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.ok()) return broken_;
  }
  for (const EngineCommunicators::OfSteps& of : communicators_.of_steps())
    if (absl::Status status = of.communicator.status(); !status.ok()) return status;
  return inputs_.device.status();
}

std::string StepCommunicators::WhereBroken(const absl::Status& broken) const {
  const std::lock_guard lock(mutex_);
  return broken == broken_ ? broken_at_ : "";
}

void StepCommunicators::Abort(const absl::Status& why) {
  for (EngineCommunicators::OfSteps& of : communicators_.of_steps()) of.communicator.Abort(why);
}

absl::StatusOr<std::vector<std::vector<int64_t>>> StepCommunicators::Logs(
    std::span<const int64_t> own, const absl::Status& broken) {
  Communicator& control = communicators_.control();
  Stream& reduce = streams_.reduce();
  // Ranks that compute have been woken, and come when their kernels have ended. A rank that does
  // not has stalled, or is in a call of another engine.
  std::optional<Watchdog> watchdog;
  if (absl::IsDeadlineExceeded(broken) && control.status().ok()) {
    watchdog.emplace(
        control,
        std::max(kDifferenceSecondsMin, kDifferenceOfTimeout * inputs_.config.ebb.timeout_seconds),
        broken);
  }
  auto logs = AllLists(communicators_.Control(reduce), own);
  if (!logs.ok()) return logs;
  // No rank goes on, and perhaps withdraws, before all have the logs.
  if (const absl::Status met = control.Barrier(reduce); !met.ok()) control.Abort(met);
  reduce.WaitIdle();
  return logs;
}

void StepCommunicators::NoteCollective(Communicator& communicator, absl::Status status,
                                       StepErrors& errors) {
  if (status.ok()) return;
  communicator.Abort(status);
  errors.Note(std::move(status));
}

// The time-out passes once. A thread that waits in another communicator of the step, here or on
// other ranks, does not wait for its own time-out.
void StepCommunicators::NoteIfBroken(const Communicator& communicator,
                                     absl::FunctionRef<std::string()> where) {
  const absl::Status broken = communicator.status();
  if (broken.ok()) return;
  // NCCL's operations run long after the host was here, and its communicators fail together.
  std::string at = inputs_.uses_nccl() ? "" : where();
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.ok()) return;
    broken_ = broken;
    broken_at_ = std::move(at);
  }
  if (absl::IsDeadlineExceeded(broken)) Abort(broken);
}

}  // namespace ebb
