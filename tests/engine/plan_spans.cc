#include "tests/engine/plan_spans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/waits.h"

namespace ebb::testing {

using sharding::Operation;
using sharding::OperationKind;

namespace {

std::string SpanName(const sharding::Plan& plan, const Operation& operation) {
  std::string name(sharding::Name(operation.kind));
  if (!operation.parts.empty())
    absl::StrAppend(&name, " ", plan.unit_names[static_cast<size_t>(operation.parts[0].unit)]);
  return name;
}

}  // namespace

StepSpans Match(const sharding::Plan& plan, const TraceTracks& tracks, int rank, int64_t step,
                bool carrying) {
  StepSpans spans(plan.operations.size());
  std::map<int, std::vector<const TraceSpan*>> left;  // by stream, in order
  for (int stream = 1; stream < sharding::kStreams; ++stream) {
    const auto track = tracks.find({rank, stream});
    if (track == tracks.end()) continue;
    EXPECT_EQ(track->second.name, std::string(sharding::Name(sharding::StreamId(stream))));
    for (const TraceSpan& span : track->second.spans) {
      if (span.step == step) left[stream].push_back(&span);
    }
    std::reverse(left[stream].begin(), left[stream].end());
  }
  for (const sharding::Moment& moment : plan.moments) {
    for (int index : moment.operations()) {
      const Operation& operation = plan.operations[static_cast<size_t>(index)];
      if (operation.kind == OperationKind::kMark) continue;
      if (operation.condition ==
          (carrying ? sharding::Condition::kNotCarrying : sharding::Condition::kCarrying))
        continue;
      std::vector<const TraceSpan*>& stream = left[static_cast<int>(operation.stream)];
      const std::string name = SpanName(plan, operation);
      if (stream.empty() || stream.back()->name != name) {
        ADD_FAILURE() << "where " << name << " belongs there is "
                      << (stream.empty() ? "nothing" : stream.back()->name);
        return spans;
      }
      EXPECT_EQ(stream.back()->bytes, operation.bytes) << name;
      spans[static_cast<size_t>(index)] = stream.back();
      stream.pop_back();
    }
  }
  for (const auto& [stream, rest] : left) EXPECT_TRUE(rest.empty()) << rest.back()->name;
  return spans;
}

namespace {

bool IsOfHost(sharding::StreamId stream) {
  switch (stream) {
    case sharding::StreamId::kHostSum:
    case sharding::StreamId::kHostUpdate:
    case sharding::StreamId::kReadParameters:
    case sharding::StreamId::kReadStates:
    case sharding::StreamId::kWrite:
      return true;
    default:
      return false;
  }
}

}  // namespace

void ExpectOrder(const sharding::Plan& plan, const StepSpans& spans, const StepSpans* before,
                 Clocks clocks) {
  sharding::Fragment fragment = sharding::Lower(plan, plan.carries_updates);
  const sharding::Fragment* const only[] = {&fragment};
  const sharding::Cells cells(only, plan);
  sharding::DeriveWaits(cells, fragment);
  const std::vector<sharding::Instruction>& instructions = fragment.instructions;
  const auto follows = [&](const sharding::Instruction& now, const StepSpans& of,
                           const sharding::Instruction& other) {
    if (other.operation < 0) return;  // a scope's kernels, which have no span
    const TraceSpan* const then = spans[static_cast<size_t>(now.operation)];
    const TraceSpan* const earlier = of[static_cast<size_t>(other.operation)];
    const bool late =
        clocks == Clocks::kOfGpuAndHost && IsOfHost(now.stream) && !IsOfHost(other.stream);
    if (earlier == nullptr || late) return;
    EXPECT_GE(then->begin_ns, earlier->end_ns)
        << then->name << " begins before the end of " << earlier->name;
  };
  const auto touches = [&](const sharding::Instruction& instruction, sharding::CellUse entered) {
    std::vector<sharding::CellRange> ranges;
    for (const sharding::Operand& operand : instruction.operands) {
      if (entered.writes || sharding::Writes(operand.access)) cells.Find(operand, ranges);
    }
    return std::any_of(ranges.begin(), ranges.end(), [&](const sharding::CellRange& range) {
      return entered.cell >= range.first && entered.cell < range.second;
    });
  };
  for (const sharding::Instruction& now : instructions) {
    if (now.operation < 0 || spans[static_cast<size_t>(now.operation)] == nullptr) continue;
    for (int wait : now.waits) follows(now, spans, instructions[static_cast<size_t>(wait)]);
    if (before == nullptr) continue;
    // Operations of the step before on the same bytes.
    for (const sharding::CellUse& entered : now.enters) {
      if (entered.by_parity) continue;
      for (const sharding::Instruction& other : instructions)
        if (touches(other, entered)) follows(now, *before, other);
    }
  }
}

}  // namespace ebb::testing
