// Spans of the timeline: operations where their streams come to them, timed by the device where it has
// a clock for its streams, and by tasks of the streams elsewhere.
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

using sharding::Operation;
using sharding::OperationKind;

absl::Status Executor::MakeTimeline() {
  if (config_.ebb.trace.empty()) return absl::OkStatus();
  if (rank_ == 0) EBB_RETURN_IF_ERROR(Timeline::Create(config_.ebb.trace));
  timeline_ = std::make_unique<Timeline>(Timeline::Options{.rank = rank_, .name = options_.name});
  for (int s = 0; s < sharding::kStreams; ++s)
    timeline_->AddTrack(std::string(sharding::Name(static_cast<sharding::StreamId>(s))));
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<SpanClock> clock, device_.NewSpanClock());
  if (clock == nullptr) return absl::OkStatus();
  device_spans_ = std::make_unique<DeviceSpans>(std::move(clock), *timeline_);
  // The host is two steps ahead of the device at most.
  return device_spans_->Reserve(3 * static_cast<int>(own_->plan.operations.size()));
}

// A device that has no room for more events has failed by now, or will say so elsewhere: a timeline is
// no reason to fail.
void Executor::CollectSpans(const Runnable* next) {
  if (device_spans_ == nullptr) return;
  device_spans_->Collect();
  if (next == nullptr || !progress_.trace.shown) return;
  const absl::Status reserved =
      device_spans_->Reserve(static_cast<int>(next->plan.operations.size()));
  if (!reserved.ok()) {
    LogWarning(absl::StrCat("operations are missing from the timeline: ", reserved.message()));
  }
}

void Executor::TraceBegin(Stream& stream, Runnable& run, int index) {
  if (timeline_ == nullptr || !progress_.trace.shown) return;
  if (TimedByDevice(stream)) {
    run.begin_ns[index] = device_spans_->Begin(stream);
    return;
  }
  stream.Enqueue([&run, index] { run.begin_ns[index] = Timeline::NowNs(); });
}

void Executor::TraceEnd(Stream& stream, Runnable& run, int index, StepTag step) {
  if (timeline_ == nullptr || !step.trace.shown) return;
  if (TimedByDevice(stream)) {
    return device_spans_->End(static_cast<int>(run.begin_ns[index]), stream,
                              SpanOf(run, index, step));
  }
  stream.Enqueue([this, &run, index, step] { Trace(run, index, step); });
}

Timeline::Span Executor::SpanOf(const Runnable& run, int index, StepTag step) const {
  const Operation& operation = run.plan.operations[index];
  return {.operation = sharding::Name(operation.kind).data(),
          .subject = operation.parts.empty()
                         ? std::string_view()
                         : std::string_view(run.plan.unit_names[operation.parts.front().unit]),
          .track = static_cast<int>(operation.stream),
          .step = step.trace.step,
          .evaluation = step.trace.evaluation,
          .bytes = operation.bytes};
}

void Executor::Trace(const Runnable& run, int index, StepTag step) {
  if (timeline_ == nullptr || !step.trace.shown) return;
  const Operation& operation = run.plan.operations[index];
  const int64_t end_ns = Timeline::NowNs();
  Timeline::Span span = SpanOf(run, index, step);
  span.begin_ns = run.begin_ns[index];
  span.end_ns = end_ns;
  timeline_->Add(span);
  // The next transfer's span, which has begun before.
  if (operation.kind == OperationKind::kNarrow)
    transfers_traced_ns_[static_cast<size_t>(operation.stream)] = end_ns;
}

}  // namespace ebb
