#include "ebb/runtime/engine/issue_tracer.h"

#include <algorithm>

namespace ebb {
namespace {

Timeline::Span SpanOf(const LinkedFragment& run, int index, const StepTag& step) {
  const sharding::Instruction& instruction = run[index];
  return {.operation = sharding::Name(instruction.role).data(),
          .subject = run.unit_name(index),
          .track = static_cast<int>(instruction.stream),
          .step = step.trace.step,
          .evaluation = step.trace.evaluation,
          .bytes = instruction.bytes};
}

}  // namespace

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
    return device_->End(static_cast<int>(run.begun(index)), stream, SpanOf(run, index, step));
  stream.Enqueue([this, &run, index, step] {
    Timeline::Span span = SpanOf(run, index, step);
    // Spans of one track do not overlap, though transfers do.
    int64_t& traced = traced_ns_[span.track];
    span.begin_ns = std::max(run.begun(index), traced);
    span.end_ns = traced = Timeline::NowNs();
    timeline_.Add(span);
  });
}

}  // namespace ebb
