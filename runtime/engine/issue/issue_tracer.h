// Spans of the timeline for operations. The device times them if it has a clock for its streams;
// otherwise tasks of the streams do.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/issue/device_spans.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/trace/timeline.h"
#include "ebb/sharding/model.h"

namespace ebb {

class IssueTracer : public IssueObserver {
 public:
  // Spans borrow the names of `units`. All arguments outlive this.
  // `device`: of its streams; null: the host's tell the time.
  IssueTracer(std::span<const UnitSpec> units, Timeline& timeline, DeviceSpans* device)
      : units_(units), timeline_(timeline), device_(device) {}

  void Begin(LinkedList& run, int op, const StepTag& step, Stream& stream) override;
  void End(LinkedList& run, int op, const StepTag& step, Stream& stream) override;

 private:
  bool TimedByDevice(const Stream& stream) const {
    return device_ != nullptr && RunsOnDevice(stream);
  }

  // Names of plans would go with an order that goes (Engine::Reorder).
  Timeline::Span SpanOf(const sharding::Op& op, const StepTag& step) const;

  const std::span<const UnitSpec> units_;
  Timeline& timeline_;
  DeviceSpans* const device_;
  int64_t traced_ns_[sharding::kStreams] = {};  // until when, by stream
};

}  // namespace ebb
