// The other ranks and the device, as what comes of a step depends on them. The engine's are its
// communicators (step_communicators.h).
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

  // Until the exchange of the step of this parity was concluded on the reduce stream.
  virtual void AwaitConclusion(int parity) = 0;
  // Until the updates in the queues have ended. Only of an engine that has failed.
  virtual void AwaitUpdates() = 0;
  // The first failure of a communicator of the steps, or else of the device. Any thread.
  virtual absl::Status Broken() const = 0;
  virtual absl::Status DeviceFailure() const = 0;
  // At which operation it was seen; empty: unknown, or `broken` is not what was seen first.
  virtual std::string WhereBroken(const absl::Status& broken) const = 0;
  // What other ranks are to learn at their next collective of a step.
  virtual void Abort(const absl::Status& why) = 0;
  // No rank is to wait any longer for what this one has to say outside of steps.
  virtual void Withdraw(const absl::Status& why) = 0;
  // Every rank's log of what it began and opened, by rank. Waits for all ranks, or an error. `broken`: why
  // they have to tell each other; OK: nothing has broken.
  virtual absl::StatusOr<std::vector<std::vector<int64_t>>> Logs(std::span<const int64_t> own,
                                                                 const absl::Status& broken) = 0;
};

}  // namespace ebb
