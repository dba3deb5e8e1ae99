// Makes all ranks stop after the same step if any of them gets Ctrl-C or another signal, or cannot
// print any more (standard_output.h).
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"

namespace ebb::gpt {

// From here on SIGINT, SIGTERM and SIGHUP (a closed terminal) are remembered; a second one ends the
// process at once. `before_time_is_up`: also SIGUSR1, with which SLURM announces the end of the
// job. SIGPIPE is remembered, any number of times: the output has no reader any more.
void CatchStopSignals(bool before_time_is_up);

// Before each step, and each walk of an evaluation or sample, every rank casts a vote and reads the
// result of the vote before. The new vote travels meanwhile.
class StopVote {
 public:
  static absl::StatusOr<StopVote> Create(const World& world, const Device& device,
                                         double timeout_seconds);
  StopVote(StopVote&&) noexcept;
  ~StopVote();

  // Collective. After it stopped() is true on every rank, for good, or on none. If the ranks cannot
  // vote any more the whole world fails with the returned error; the engine then knows more of it.
  absl::Status Decide();
  bool stopped() const;
  // Stopped because a rank cannot print.
  bool output_failed() const;
  // The signal's name, or another reason, if stopped.
  std::string stopped_by() const;
  // Collective: returns once all ranks have come.
  absl::Status Meet();

 private:
  struct State;
  explicit StopVote(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ebb::gpt
