// The timeline of an engine, if the config asks for one. The device times operations if it has a
// clock for its streams; else tasks of the streams do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/device_spans.h"
#include "ebb/runtime/engine/issue/issue_tracer.h"
#include "ebb/runtime/trace/timeline.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class StepTimeline {
 public:
  explicit StepTimeline(const EngineInputs& inputs) : inputs_(inputs) {}

  // Without ebb.trace there is no timeline, and these calls do nothing.
  absl::Status Make(const sharding::Plan& plan);
  // The observer of operations; null: there is none.
  IssueTracer* tracer() { return tracer_ ? &*tracer_ : nullptr; }
  void Add(const TraceLabel& step, const char* operation, std::string_view subject,
           int64_t begin_ns, int64_t end_ns);
  // Around work that the trainer enqueues on the compute stream: a span there, or on a GPU beside it.
  // End takes what Begin has returned.
  int64_t Begin(const TraceLabel& step, Stream& compute);
  void End(const TraceLabel& step, int64_t begun, const char* operation, std::string_view subject,
           int64_t bytes, Stream& compute);
  // Takes the spans that have ended. `next`: number of coming operations with spans of their own.
  void Collect(int64_t next);
  // Appends all spans to the file. Call once every stream is idle.
  void Write();

 private:
  const EngineInputs& inputs_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<DeviceSpans> device_spans_;  // of device streams; null: the host's clock counts
  std::optional<IssueTracer> tracer_;
  int kernels_track_ = 0;  // of End's spans
  // Spans of Begin since the last Collect for operations to come, and the most between two of these.
  int64_t begun_ = 0, begun_most_ = 0;
};

}  // namespace ebb
