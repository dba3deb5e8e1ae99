// How long steps take on a machine, from the very operations that an engine runs: a virtual clock
// goes over them. An operation starts when its stream is free, its waits are over (its own, and
// through the frontier those on earlier steps) and the caller has issued it. The caller is a clock
// of its own. It waits where the engine's caller waits, and on the CPU it is the compute stream.
//
// Operations that run at once share the machine's resources, so each takes longer. Transfers that
// start on one line and end on another move their bytes one after the other. Latencies of such
// transfers (Cost::latency) overlap. One rank stands for all.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/costs.h"
#include "ebb/sharding/waits.h"

namespace ebb::sharding {

struct SimulatedSpan {
  int step = 0, op = 0;
  double begin = 0, end = 0;  // seconds from the first step's begin
};

// Seconds of a step, by line and by resource. The caller's line has its time beside waiting and
// computing.
inline constexpr int kCallerLine = kLines;
std::string_view NameOfLine(int line);  // of its stream; "caller"
struct StepSeconds {
  std::array<double, kLines + 1> lines = {};
  std::array<double, kResources> resources = {};
};

struct Simulated {
  // In the steady state: from the end of one step's kernels to the end of the next one's.
  double seconds_per_step = 0;
  double seconds = 0;  // until all that was issued is over
  // In the steady state, how long each line is in use, and each resource would be at its full rate.
  StepSeconds busy;
  // The critical path: the chain of operations, each the last that the next one waited for, that
  // ends with a step's kernels. By line these are all of the step's seconds; by resource those for
  // which one was full.
  StepSeconds critical;
  std::vector<SimulatedSpan> spans;  // as issued

  int critical_line() const;                          // kCallerLine: the caller
  std::optional<Resource> critical_resource() const;  // none where no resource was ever full
};

inline constexpr int kSimulatedSteps = 6;
// The middle round of a step is repeated kSimulatedAgain times at most, or up to kSimulatedAgainMost
// times while rounds are hidden behind something longer. Each further repeat adds the same time,
// which is added without running it. `spans` has only what ran.
inline constexpr int kSimulatedAgain = 16, kSimulatedAgainMost = 256;

// `first` runs once, then `later`, with the waits of DeriveWaits, at least 4 steps in all. The
// second half without the last step is the steady state. Errors: costs that are negative, infinite
// or not a number, or ask for a resource without a positive rate.
absl::StatusOr<Simulated> Simulate(const Cells& cells, const OpList& first, const OpList& later,
                                   const Costs& costs, int steps = kSimulatedSteps);
// No step takes less: the seconds of the resource that its list uses most, at the full rate.
double LeastSeconds(const OpList& later, const Costs& costs);

// Steps of a plan. Each but the first carries updates of the step before.
absl::StatusOr<Simulated> Simulate(const Plan& plan, const Costs& costs,
                                   int steps = kSimulatedSteps);

}  // namespace ebb::sharding
