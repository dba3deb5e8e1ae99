#include "ebb/runtime/engine/issue/issue_tracer.h"

#include <algorithm>
#include <string_view>

namespace ebb {

Timeline::Span IssueTracer::SpanOf(const sharding::Instruction& instruction,
                                   const StepTag& step) const {
  const std::span<const sharding::Part> parts = instruction.parts;
  return {.operation = sharding::Name(instruction.role).data(),
          .subject = parts.empty() ? std::string_view()
                                   : units_[static_cast<size_t>(parts.front().unit)].name,
          .track = static_cast<int>(instruction.stream),
          .step = step.trace.step,
          .evaluation = step.trace.evaluation,
          .bytes = instruction.bytes};
}

void IssueTracer::Begin(LinkedFragment& run, int index, const StepTag& step, Stream& stream) {
  if (!step.trace.shown || run[index].operation < 0) return;
  if (TimedByDevice(stream)) {
    run.begun(index) = device_->Begin(stream);
    return;
  }
  stream.Enqueue([&run, index] { run.begun(index) = Timeline::NowNs(); });
}

void IssueTracer::End(LinkedFragment& run, int index, const StepTag& step, Stream& stream) {
  if (!step.trace.shown || run[index].operation < 0) return;
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
