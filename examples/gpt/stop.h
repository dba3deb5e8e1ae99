// Ctrl-C, agreed on: the ranks of a world stop after the same step, whichever of them saw the
// signal and when.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"

namespace ebb::gpt {

// From here on SIGINT and SIGTERM are remembered; a second one ends the process at once.
void CatchStopSignals();

// Before each step every rank casts a vote, which travels while the step runs, and reads that of
// the step before.
class StopVote {
 public:
  static absl::StatusOr<StopVote> Create(const World& world, const Device& device);
  StopVote(StopVote&&) noexcept;
  ~StopVote();

  // Collective, once a step. True on every rank, or on none: stop before this step.
  absl::StatusOr<bool> Decide();

 private:
  struct State;
  explicit StopVote(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ebb::gpt
