// The other ranks and the device, as far as the outcome of a step depends on them. The engine's
// peers are its communicators (step_communicators.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

class StepPeers {
 public:
  virtual ~StepPeers() = default;

  // Waits until the reduce stream has concluded the exchange of the step of this parity.
  virtual void AwaitConclusion(int parity) = 0;
  // Waits until the updates in the queues have ended. Only for an engine that has failed.
  virtual void AwaitUpdates() = 0;
  // The first failure of a communicator of the steps, or else of the device. Any thread.
  virtual absl::Status Broken() const = 0;
  virtual absl::Status DeviceFailure() const = 0;
  // The operation that saw it; empty: unknown, or `broken` is not the first failure.
  virtual std::string WhereBroken(const absl::Status& broken) const = 0;
  // Other ranks learn `why` at their next collective of a step.
  virtual void Abort(const absl::Status& why) = 0;
  // No rank waits any longer for this one outside of steps.
  virtual void Withdraw(const absl::Status& why) = 0;
  // Every rank's log of its calls and scopes, by rank. Waits for all ranks, or an error. `broken`:
  // the reason of the exchange; OK: nothing has broken.
  virtual absl::StatusOr<std::vector<std::vector<int64_t>>> Logs(std::span<const int64_t> own,
                                                                 const absl::Status& broken) = 0;
};

}  // namespace ebb
