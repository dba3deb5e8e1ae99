// The spans of a timeline as operations of the plan that was run.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"
#include "tests/trace/trace_events.h"

namespace ebb::testing {

// By operation of the plan. Marks do nothing, so they have none, and neither have operations that
// the step did not run.
using StepSpans = std::vector<const TraceSpan*>;

// Spans of one rank and step. Fails the test where a stream has others than the plan's, or in
// another order. `carrying`: the step ran updates of the one before.
StepSpans Match(const sharding::Plan& plan, const TraceTracks& tracks, int rank, int64_t step,
                bool carrying = false);

// No operation begins before its waits have ended, in its step and in the step before, which may be
// null. A GPU's times are late by some microseconds, so the host's later work is not compared with
// them.
enum class Clocks { kOne, kOfGpuAndHost };
void ExpectOrder(const sharding::Plan& plan, const StepSpans& spans, const StepSpans* before,
                 Clocks clocks = Clocks::kOne);

}  // namespace ebb::testing
