// Which step or evaluation runs an instruction.
#pragma once

#include <cstdint>

namespace ebb {

// What spans of the timeline are said to belong to: a step or an evaluation, each counted from 1.
struct TraceLabel {
  int64_t step = 0, evaluation = 0;
  bool shown = true;
};

// Which step an instruction belongs to that runs on a stream, when the host may already be elsewhere.
struct StepTag {
  TraceLabel trace;
  int64_t finished = 0;  // steps before it
  int parity = 0;        // of the step that runs it
  bool counts = true;    // it is a step's
  float divide = 1;      // what its sums of gradients are multiplied with
};

}  // namespace ebb
