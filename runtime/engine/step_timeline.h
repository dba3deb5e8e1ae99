// The timeline of an engine, where the config asks for one: instructions timed by the device where it has a clock
// for its streams, and by tasks of the streams elsewhere.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "ebb/runtime/engine/device_spans.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue_tracer.h"
#include "ebb/runtime/trace/timeline.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class StepTimeline {
 public:
  explicit StepTimeline(const EngineInputs& inputs) : inputs_(inputs) {}

  // Without ebb.trace there is none, and the calls below do nothing.
  absl::Status Make(const sharding::Plan& plan);
  // What sees instructions as they are issued; null: nothing.
  IssueTracer* tracer() { return tracer_ ? &*tracer_ : nullptr; }
  void Add(const TraceLabel& step, const char* operation, std::string_view subject,
           int64_t begin_ns, int64_t end_ns);
  // Takes the spans that have ended. `next`: operations that are to run and be shown, with spans of their own.
  void Collect(int64_t next);
  // Appends all to the file. Once every stream is idle.
  void Write();

 private:
  const EngineInputs& inputs_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<DeviceSpans> device_spans_;  // of its streams; null: the host's tell the time
  std::optional<IssueTracer> tracer_;
};

}  // namespace ebb
