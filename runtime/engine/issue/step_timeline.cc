#include "ebb/runtime/engine/issue/step_timeline.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// Once for all ranks of a host, because they write one file and have one reason, and steps repeat it.
void WarnOnce(const World& world, const std::string& what, absl::string_view why) {
  static std::mutex mutex;
  static auto* const said = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  CallOrder* const calls = world.calls();
  if (said->insert(what).second && (calls == nullptr || calls->IsFirstToWarn(what)))
    LogWarning(absl::StrCat(what, ": ", why));
}

}  // namespace

absl::Status StepTimeline::Make(const sharding::Plan& plan) {
  if (inputs_.config.ebb.trace.empty()) return absl::OkStatus();
  if (inputs_.of_verdict().rank() == 0)
    EBB_RETURN_IF_ERROR(Timeline::Create(inputs_.config.ebb.trace));
  timeline_ = std::make_unique<Timeline>(
      Timeline::Options{.rank = inputs_.of_verdict().rank(), .name = inputs_.options.name});
  for (int s = 0; s < sharding::kStreams; ++s)
    timeline_->AddTrack(std::string(sharding::Name(static_cast<sharding::StreamId>(s))));
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<SpanClock> clock, inputs_.device.NewSpanClock());
  if (clock != nullptr) device_spans_ = std::make_unique<DeviceSpans>(std::move(clock), *timeline_);
  // Scopes are on the compute line by the host's clock, which a device's spans would overlap.
  if (device_spans_ != nullptr && inputs_.config.ebb.mesh.tensor > 1)
    kernels_track_ = timeline_->AddTrack("compute on the device");
  tracer_.emplace(inputs_.model.units, *timeline_, device_spans_.get());
  if (device_spans_ == nullptr) return absl::OkStatus();
  // The host is two steps ahead of the device at most.
  return device_spans_->Reserve(3 * static_cast<int>(plan.Shown()));
}

void StepTimeline::Add(const TraceLabel& step, const char* operation, std::string_view subject,
                       int64_t begin_ns, int64_t end_ns) {
  if (timeline_ == nullptr || !step.shown) return;
  timeline_->Add({.operation = operation,
                  .subject = subject,
                  .track = 0,
                  .begin_ns = begin_ns,
                  .end_ns = end_ns,
                  .step = step.step,
                  .evaluation = step.evaluation});
}

int64_t StepTimeline::Begin(const TraceLabel& step, Stream& compute) {
  if (timeline_ == nullptr || !step.shown) return 0;
  ++begun_;
  if (device_spans_ != nullptr && RunsOnDevice(compute)) return device_spans_->Begin(compute);
  return Timeline::NowNs();  // the host's compute stream is this thread
}

void StepTimeline::End(const TraceLabel& step, int64_t begun, const char* operation,
                       std::string_view subject, int64_t bytes, Stream& compute) {
  if (timeline_ == nullptr || !step.shown) return;
  Timeline::Span span = {.operation = operation,
                         .subject = subject,
                         .track = kernels_track_,
                         .step = step.step,
                         .evaluation = step.evaluation,
                         .bytes = bytes};
  if (device_spans_ != nullptr && RunsOnDevice(compute))
    return device_spans_->End(static_cast<int>(begun), compute, span);
  span.begin_ns = begun;
  span.end_ns = Timeline::NowNs();
  timeline_->Add(span);
}

// A device that has no room for more events has failed by now, or will say so elsewhere: a timeline
// is no reason to fail.
void StepTimeline::Collect(int64_t next) {
  if (device_spans_ == nullptr) return;
  device_spans_->Collect();
  if (next == 0) return;
  begun_most_ = std::max(begun_most_, std::exchange(begun_, 0));
  const absl::Status reserved = device_spans_->Reserve(static_cast<int>(next + begun_most_));
  if (!reserved.ok()) {
    WarnOnce(inputs_.given_world,
             absl::StrCat("operations are missing from the timeline ", inputs_.config.ebb.trace),
             reserved.message());
  }
}

void StepTimeline::Write() {
  if (timeline_ == nullptr) return;
  Collect(/*next=*/0);
  const std::string& path = inputs_.config.ebb.trace;
  if (absl::Status written = timeline_->AppendTo(path); !written.ok()) {
    WarnOnce(inputs_.given_world, absl::StrCat("the timeline was not written to ", path),
             written.message());
  } else if (timeline_->dropped() > 0 && inputs_.of_verdict().rank() == 0) {
    LogWarning(absl::StrCat("the timeline was full: ", timeline_->dropped(),
                            " later spans of each rank are not in '", path, "'"));
  }
}

}  // namespace ebb
