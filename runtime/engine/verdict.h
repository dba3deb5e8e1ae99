// A step from its exchange until the host has taken what came of it. On a GPU that may be two steps
// later: what follows for the device and for the steps after it is concluded in the order of the
// reduce stream, and does not wait for the host.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "ebb/optim/loss_scaler.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/exchange.h"

namespace ebb {

struct StepVerdict {
  // The host's, from before its exchange is enqueued.
  bool open = false;      // the host has not taken it yet
  bool deferred = false;  // nor does Finish
  bool evaluation = false, early = false;
  int64_t exchange = 0;  // ExchangeRecord::exchange
  double divisor = 1;
  std::optional<double> learning_rate = {};  // the step's own
  absl::Status error = {};                   // this rank's
  std::vector<int64_t> log = {};             // as StepProgress has it

  // In the order of the reduce stream.
  bool updates_started = false;  // early ones, on this rank
  bool complete = false;         // all ranks' records have come
  Verdict ranks = {};
  Evaluation::Sums sums = {};  // an evaluation's
  bool failed = false;         // nothing of it is applied, and no step was finished
  int64_t cause = 0;           // the exchange of the error that is to blame, perhaps an earlier one
  StepReport report = {};
  float next_loss_scale = 1;
  bool at_minimum = false;  // the scale
};

// What follows from all steps so far, in the order of the reduce stream.
struct Standing {
  optim::LossScaler scaler;
  int64_t finished = 0, applied = 0, skipped = 0;  // steps
  // The exchange of an error that some rank's caller may not know yet; 0: there is none. Until all do,
  // no step is applied: it was begun as if the one before it had gone well.
  int64_t cause = 0;
};

}  // namespace ebb
