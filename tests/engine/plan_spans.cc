#include "tests/engine/plan_spans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace ebb::testing {

using sharding::Dependency;
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
    case sharding::StreamId::kCheck:
      return true;
    default:
      return false;
  }
}

}  // namespace

void ExpectOrder(const sharding::Plan& plan, const StepSpans& spans, const StepSpans* before,
                 Clocks clocks) {
  for (size_t index = 0; index < spans.size(); ++index) {
    if (spans[index] == nullptr) continue;
    const auto follows = [&](const StepSpans& of, size_t other) {
      const TraceSpan* const earlier = of[other];
      const bool late = clocks == Clocks::kOfGpuAndHost &&
                        IsOfHost(plan.operations[index].stream) &&
                        !IsOfHost(plan.operations[other].stream);
      if (earlier == nullptr || late) return;
      EXPECT_GE(spans[index]->begin_ns, earlier->end_ns)
          << spans[index]->name << " begins before the end of " << earlier->name;
    };
    for (const Dependency& dependency : plan.operations[index].after) {
      if (dependency.kind == Dependency::kOperation)
        follows(spans, static_cast<size_t>(dependency.index));
      if (dependency.kind != Dependency::kUpdated || before == nullptr) continue;
      for (size_t other = 0; other < before->size(); ++other) {
        const Operation& operation = plan.operations[other];
        const bool updates =
            operation.kind == OperationKind::kUpdate || operation.kind == OperationKind::kRefresh;
        for (const sharding::Part& part : operation.parts) {
          if (updates && part.unit == dependency.index) follows(*before, other);
        }
      }
    }
  }
}

}  // namespace ebb::testing
