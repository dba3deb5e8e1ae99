// Makes all ranks stop after the same step if any of them gets Ctrl-C or another signal, or cannot
// write its output any more (report/output.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"

namespace ebb::gpt {

// Until CatchStopSignals, the same signals end the process with this exit code and a line: while
// ranks meet, and text is loaded.
void EndOnStopSignals(int exit_code, bool before_time_is_up);

// From here on the first of SIGINT, SIGTERM, SIGHUP (a closed terminal) and SIGPIPE (the output has
// no reader any more) is remembered. Later ones count as the first, unless EndsAtOnce.
// `before_time_is_up`: also SIGUSR1, SIGUSR2 and SIGXCPU, with which batch systems announce the end
// of a job.
void CatchStopSignals(bool before_time_is_up);

// Whether a signal after the first one ends the process at once: Ctrl-C in a terminal, where a
// person waits, but no key that was pressed twice. A launcher sends its signals twice, or passes on
// what the terminal has sent already. `code`: of siginfo_t.
bool EndsAtOnce(int64_t nanoseconds_since_first, int signal, int code);

// Before each step, and each walk of an evaluation or sample, every rank casts a vote and reads the
// result of the vote before. The new vote travels meanwhile.
class StopVote {
 public:
  static absl::StatusOr<std::unique_ptr<StopVote>> Create(const World& world, const Device& device,
                                                          double timeout_seconds);
  StopVote(const StopVote&) = delete;
  StopVote& operator=(const StopVote&) = delete;

  // Collective. After it stopped() is true on every rank, for good, or on none. If the ranks cannot
  // vote any more the whole world fails with the returned error; the engine then knows more of it.
  absl::Status Decide();
  bool stopped() const { return stopped_; }
  // Stopped because a rank cannot write its output.
  bool output_failed() const;
  // The signal's name, or another reason, if stopped.
  std::string stopped_by() const;
  // Collective: returns once all ranks have come.
  absl::Status Meet();

 private:
  StopVote(const World& world, Communicator communicator, Stream stream)
      : world_(world), communicator_(std::move(communicator)), stream_(std::move(stream)) {}

  const World world_;
  float vote_ = 0;
  bool stopped_ = false;
  const CollectiveSpan span_ = {.send = &vote_, .receive = &vote_, .count = 1};
  Communicator communicator_;
  Stream stream_;  // destroyed first: its queue is empty before its work's data are destroyed
};

}  // namespace ebb::gpt
