#include "tests/engine/plan_spans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/waits.h"

namespace ebb::testing {

using sharding::Op;
using sharding::Role;

namespace {

std::string SpanName(const sharding::Plan& plan, const Op& operation) {
  std::string name(sharding::Name(operation.role));
  if (!operation.parts.empty())
    absl::StrAppend(&name, " ", plan.unit_names[static_cast<size_t>(operation.parts[0].unit)]);
  return name;
}

}  // namespace

StepSpans Match(const sharding::Plan& plan, const TraceTracks& tracks, int rank, int64_t step,
                bool carrying) {
  StepSpans spans(static_cast<size_t>(plan.Shown()));
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
    for (int index = moment.begin; index < moment.end; ++index) {
      const Op& operation = plan.ops[static_cast<size_t>(index)];
      if (operation.number < 0 || operation.role == Role::kMark || !operation.runs(carrying))
        continue;
      std::vector<const TraceSpan*>& stream = left[static_cast<int>(operation.stream)];
      const std::string name = SpanName(plan, operation);
      if (stream.empty() || stream.back()->name != name) {
        ADD_FAILURE() << "where " << name << " belongs there is "
                      << (stream.empty() ? "nothing" : stream.back()->name);
        return spans;
      }
      EXPECT_EQ(stream.back()->bytes, operation.bytes) << name;
      spans[static_cast<size_t>(operation.number)] = stream.back();
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
  sharding::OpList list = sharding::ListOf(plan, plan.carries_updates);
  const sharding::OpList* const only[] = {&list};
  const sharding::Cells cells(only, plan);
  sharding::DeriveWaits(cells, list);
  const std::vector<sharding::Op>& ops = list.ops;
  const auto follows = [&](const sharding::Op& now, const StepSpans& of,
                           const sharding::Op& other) {
    if (other.number < 0) return;  // a scope's kernels, which have no span
    const TraceSpan* const then = spans[static_cast<size_t>(now.number)];
    const TraceSpan* const earlier = of[static_cast<size_t>(other.number)];
    const bool late =
        clocks == Clocks::kOfGpuAndHost && IsOfHost(now.stream) && !IsOfHost(other.stream);
    if (earlier == nullptr || late) return;
    EXPECT_GE(then->begin_ns, earlier->end_ns)
        << then->name << " begins before the end of " << earlier->name;
  };
  const auto touches = [&](const sharding::Op& op, sharding::CellUse entered) {
    std::vector<sharding::CellRange> ranges;
    for (const sharding::Operand& operand : op.operands) {
      if (entered.writes || sharding::Writes(operand.access)) cells.Find(operand, ranges);
    }
    return std::any_of(ranges.begin(), ranges.end(), [&](const sharding::CellRange& range) {
      return entered.cell >= range.first && entered.cell < range.second;
    });
  };
  for (size_t index = 0; index < ops.size(); ++index) {
    const sharding::Op& now = ops[index];
    if (now.number < 0 || spans[static_cast<size_t>(now.number)] == nullptr) continue;
    for (int wait : list.waits[index].on) follows(now, spans, ops[static_cast<size_t>(wait)]);
    if (before == nullptr) continue;
    // Operations of the step before on the same bytes.
    for (const sharding::CellUse& entered : list.waits[index].enters) {
      if (entered.by_parity) continue;
      for (const sharding::Op& other : ops)
        if (touches(other, entered)) follows(now, *before, other);
    }
  }
}

}  // namespace ebb::testing
