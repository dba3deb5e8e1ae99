#include "ebb/runtime/engine/issue/issue_tracer.h"

#include <algorithm>
#include <string_view>

namespace ebb {

Timeline::Span IssueTracer::SpanOf(const sharding::Op& op, const StepTag& step) const {
  const std::span<const sharding::Part> parts = op.parts;
  return {.operation = sharding::Name(op.role).data(),
          .subject = parts.empty() ? std::string_view()
                                   : units_[static_cast<size_t>(parts.front().unit)].name,
          .track = static_cast<int>(op.stream),
          .step = step.trace.step,
          .evaluation = step.trace.evaluation,
          .bytes = op.bytes};
}

void IssueTracer::Begin(LinkedList& run, int index, const StepTag& step, Stream& stream) {
  if (!step.trace.shown || run[index].number < 0) return;
  if (TimedByDevice(stream)) {
    run.begun(index) = device_->Begin(stream);
    return;
  }
  stream.Enqueue([&run, index] { run.begun(index) = Timeline::NowNs(); });
}

void IssueTracer::End(LinkedList& run, int index, const StepTag& step, Stream& stream) {
  if (!step.trace.shown || run[index].number < 0) return;
  if (TimedByDevice(stream))
    return device_->End(static_cast<int>(run.begun(index)), stream, SpanOf(run[index], step));
  stream.Enqueue([this, &run, index, step] {
    Timeline::Span span = SpanOf(run[index], step);
    // Spans of one track do not overlap, though transfers do.
    int64_t& traced = traced_ns_[span.track];
    span.begin_ns = std::max(run.begun(index), traced);
    span.end_ns = traced = Timeline::NowNs();
    timeline_.Add(span);
  });
}

}  // namespace ebb
