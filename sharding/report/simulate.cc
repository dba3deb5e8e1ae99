#include "ebb/sharding/report/simulate.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/report/step_clock.h"

namespace ebb::sharding {
namespace {

constexpr int kNone = ClockedOp::kNone;

// The operation that a step's kernels end with.
int LastOf(const StepClock& clock, int step) {
  int last = kNone;
  bool computes = false;
  for (int number = clock.first(step); number < clock.first(step + 1); ++number) {
    const auto& clocked = clock.clocked()[number];
    const bool is_compute = clock.OpOf(clocked).stream == StreamId::kCompute;
    if (computes && !is_compute) continue;
    if (is_compute == computes && last != kNone && clocked.end < clock.clocked()[last].end)
      continue;
    last = number;
    computes = is_compute;
  }
  return last;
}

// The critical path from the end of `last` back to `from`.
void AddCritical(const StepClock& clock, int last, double from, StepSeconds& seconds) {
  const auto end_of = [&](int number) { return number == kNone ? 0 : clock.clocked()[number].end; };
  for (int number = last; number != kNone && end_of(number) > from;) {
    const ClockedOp& clocked = clock.clocked()[number];
    const double since = std::max(clocked.since, from), alone = clocked.end - since;
    seconds.lines[clock.OpOf(clocked).ends] += alone;
    for (size_t r = 0; r < kResources && alone > 0; ++r)
      seconds.resources[r] += alone / (clocked.end - clocked.since) * clocked.limited[r];
    number = clocked.cause;
    seconds.lines[kCallerLine] += std::max(since - std::max(end_of(number), from), 0.0);
  }
}

// Adds how long each line is busy in steps [begin, end).
void AddBusy(const StepClock& clock, const Amounts& rates, int begin, int end,
             StepSeconds& seconds) {
  std::array<double, kLines> until = {};
  for (int number = clock.first(begin); number < clock.first(end); ++number) {
    const ClockedOp& clocked = clock.clocked()[number];
    const MachineCost& cost = clock.CostOf(clocked);
    const Line line = clock.OpOf(clocked).ends;
    seconds.lines[line] += clocked.end - std::max(clocked.since, until[line]);
    until[line] = clocked.end;
    seconds.lines[kCallerLine] += cost.caller_seconds;
    for (size_t r = 0; r < kResources; ++r) {
      const auto resource = static_cast<Resource>(r);
      if (cost.amounts[resource] > 0)
        seconds.resources[r] += cost.amounts[resource] / rates[resource];
    }
  }
}

Simulated ResultOf(const StepClock& clock, const Amounts& rates, int steps) {
  Simulated result;
  result.spans.reserve(clock.clocked().size());
  for (const ClockedOp& clocked : clock.clocked()) {
    result.spans.push_back(
        {.step = clocked.step, .op = clocked.op, .begin = clocked.begin, .end = clocked.end});
    result.seconds = std::max(result.seconds, clocked.end);
  }
  const int before = steps / 2 - 1, after = steps - 2, count = after - before;
  const int last = LastOf(clock, after), first = LastOf(clock, before);
  if (last == kNone) return result;
  const double from = clock.clocked()[first].end;
  result.seconds_per_step = (clock.clocked()[last].end - from) / count;
  AddCritical(clock, last, from, result.critical);
  AddBusy(clock, rates, before + 1, after + 1, result.busy);
  for (StepSeconds* sums : {&result.busy, &result.critical}) {
    for (double& each : sums->lines) each /= count;
    for (double& each : sums->resources) each /= count;
  }
  return result;
}

absl::StatusOr<Simulated> Run(const Cells& cells, const OpList& first, const OpList& later,
                              const Costs& costs, int steps, int again_most) {
  StepClock clock(cells, costs, steps, again_most);
  for (const OpList* list : {&first, &later}) EBB_RETURN_IF_ERROR(clock.Add(*list));
  EBB_RETURN_IF_ERROR(clock.Run());
  return ResultOf(clock, costs.rates(), steps);
}

// Whether more rounds add less time to a step than to its busiest line, because they run beside
// something longer, such as updates from a disk.
bool HidesRounds(const Simulated& fewer, const Simulated& more) {
  constexpr double kNearly = 0.99;
  double most = 0;
  for (size_t line = 0; line < more.busy.lines.size(); ++line)
    most = std::max(most, more.busy.lines[line] - fewer.busy.lines[line]);
  return more.seconds_per_step - fewer.seconds_per_step < kNearly * most;
}

// `result` with so many times the difference from a result with fewer rounds.
void Extend(double times, const Simulated& fewer, Simulated& result) {
  const auto extend = [times](double less, double& value) {
    value = std::max(0.0, value + times * (value - less));
  };
  extend(fewer.seconds_per_step, result.seconds_per_step);
  extend(fewer.seconds, result.seconds);
  for (StepSeconds Simulated::*const of : {&Simulated::busy, &Simulated::critical}) {
    for (size_t i = 0; i < (result.*of).lines.size(); ++i)
      extend((fewer.*of).lines[i], (result.*of).lines[i]);
    for (size_t i = 0; i < (result.*of).resources.size(); ++i)
      extend((fewer.*of).resources[i], (result.*of).resources[i]);
  }
}

}  // namespace

std::string_view NameOfLine(int line) {
  if (line == kCallerLine) return "caller";
  if (line == kAsyncReads) return "async reads";
  for (int stream = 0; stream < kStreams; ++stream) {
    const auto of = static_cast<StreamId>(stream);
    if (line == LineOf(of) || line == EndOf(of)) return Name(of);
  }
  return "";
}

int Simulated::critical_line() const {
  return static_cast<int>(std::max_element(critical.lines.begin(), critical.lines.end()) -
                          critical.lines.begin());
}

std::optional<Resource> Simulated::critical_resource() const {
  const auto most = std::max_element(critical.resources.begin(), critical.resources.end());
  if (*most == 0) return std::nullopt;
  return static_cast<Resource>(most - critical.resources.begin());
}

absl::StatusOr<Simulated> Simulate(const Cells& cells, const OpList& first, const OpList& later,
                                   const Costs& costs, int steps) {
  constexpr int kStepsMin = 4;
  if (steps < kStepsMin)
    return absl::InvalidArgumentError(absl::StrCat("a simulation of ", steps,
                                                   " steps: the steady state needs at least ",
                                                   kStepsMin, ", pass more"));
  const int again = std::max(first.again, later.again);
  const auto run = [&](int most) { return Run(cells, first, later, costs, steps, most); };
  absl::StatusOr<Simulated> result = run(kSimulatedAgain);
  if (again <= kSimulatedAgain || !result.ok()) return result;
  EBB_ASSIGN_OR_RETURN(Simulated fewer, run(kSimulatedAgain / 2));
  int ran = kSimulatedAgain;
  while (ran < again && ran < kSimulatedAgainMost && HidesRounds(fewer, *result)) {
    fewer = *std::move(result);
    ran *= 2;
    EBB_ASSIGN_OR_RETURN(result, run(ran));
  }
  if (again > ran) Extend((again - ran) / (0.5 * ran), fewer, *result);
  return result;
}

double LeastSeconds(const OpList& later, const Costs& costs) {
  const Amounts rates = costs.rates();
  std::array<double, kResources> seconds = {};
  for (int index = 0; index < later.size(); ++index) {
    const bool repeats =
        later.again > 0 && index >= later.round_begins[0] && index < later.round_begins[1];
    const Cost cost = costs.Of(later.ops[index]);
    for (int r = 0; r < kResources; ++r) {
      const auto resource = static_cast<Resource>(r);
      if (cost.amounts[resource] > 0)
        seconds[r] += (repeats ? 1 + later.again : 1) * cost.amounts[resource] / rates[resource];
    }
  }
  return *std::max_element(seconds.begin(), seconds.end());
}

absl::StatusOr<Simulated> Simulate(const Plan& plan, const Costs& costs, int steps) {
  OpList first = ListOf(plan, /*carrying=*/false), later = ListOf(plan, /*carrying=*/true);
  const OpList* const both[] = {&first, &later};
  const Cells cells(both, plan);
  for (OpList* list : {&first, &later}) DeriveWaits(cells, *list);
  return Simulate(cells, first, later, costs, steps);
}

}  // namespace ebb::sharding
