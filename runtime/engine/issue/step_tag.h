// Which step or evaluation runs an operation.
#pragma once

#include <cstdint>

namespace ebb {

// The label of timeline spans: a step or an evaluation, each counted from 1.
struct TraceLabel {
  int64_t step = 0, evaluation = 0;
  bool shown = true;
};

// The step of an operation that runs on a stream, when the host may already be elsewhere.
struct StepTag {
  TraceLabel trace;
  int64_t finished = 0;  // steps before it
  int parity = 0;        // of the operation's step
  bool counts = true;    // false: it is an evaluation's
  float divide = 1;      // the factor of its sums of gradients
};

}  // namespace ebb
