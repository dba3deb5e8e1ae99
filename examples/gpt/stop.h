// Ctrl-C, agreed on: the ranks of a world stop after the same step, whichever of them saw the
// signal and when. So they do when one of them cannot print any more (standard_output.h).
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"

namespace ebb::gpt {

// From here on SIGINT, SIGTERM and SIGHUP (a terminal that is gone) are remembered; a second one ends
// the process at once. `before_time_is_up`: so is SIGUSR1, with which SLURM says that it will soon
// end the job. So is SIGPIPE, any number of them: nobody reads the output any more.
void CatchStopSignals(bool before_time_is_up);

// Before each step, and each walk of an evaluation or sample, every rank casts a vote, which travels
// meanwhile, and reads the one before.
class StopVote {
 public:
  static absl::StatusOr<StopVote> Create(const World& world, const Device& device,
                                         double timeout_seconds);
  StopVote(StopVote&&) noexcept;
  ~StopVote();

  // Collective. Then stopped() is true on every rank, and stays so, or on none. Where the ranks
  // can vote no more the whole world fails with the error that is returned; the engine then has
  // more to say of it.
  absl::Status Decide();
  bool stopped() const;
  // Stopped, because a rank cannot print.
  bool output_failed() const;
  // The signal's name, or what else it was, where stopped.
  std::string stopped_by() const;
  // Collective: returns once all ranks have come.
  absl::Status Meet();

 private:
  struct State;
  explicit StopVote(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ebb::gpt
