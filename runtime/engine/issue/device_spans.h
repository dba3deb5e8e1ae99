// A device's operations, for a timeline, without a function of the host on its streams: a mark
// before and behind each. The thread that calls the engine reads the times of the marks later.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/device/span_clock.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/trace/timeline.h"

namespace ebb {

class DeviceSpans {
 public:
  DeviceSpans(std::unique_ptr<SpanClock> clock, Timeline& timeline)
      : clock_(std::move(clock)), timeline_(timeline) {}

  // Makes room for `spans` beside those under way. Not within a step: it allocates.
  absl::Status Reserve(int spans);
  // Returns a number for End; -1, which End takes, if there is no room.
  int Begin(Stream& stream) { return clock_->Begin(stream); }
  // Spans of one track are on one stream. Does not read the times.
  void End(int number, Stream& stream, const Timeline::Span& span);
  // Adds spans that are over to the timeline. Does not wait.
  void Collect();

 private:
  struct UnderWay {
    int number = 0;
    Timeline::Span span;
  };

  const std::unique_ptr<SpanClock> clock_;
  Timeline& timeline_;
  std::vector<UnderWay> under_way_;  // in the order of the calls
  std::vector<uint8_t> waits_;       // by track: a sharding::StreamId, or one more for kernels
};

}  // namespace ebb
