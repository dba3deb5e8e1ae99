// Spans of the timeline: operations where their streams come to them, timed by the device where it has
// a clock for its streams, and by tasks of the streams elsewhere.
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

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

}  // namespace ebb
