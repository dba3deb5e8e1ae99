#include "ebb/runtime/engine/issue/device_spans.h"

#include <algorithm>

#include "ebb/sharding/plan.h"

namespace ebb {

absl::Status DeviceSpans::Reserve(int spans) {
  const size_t most = under_way_.size() + static_cast<size_t>(spans);
  under_way_.reserve(most);
  waits_.resize(sharding::kStreams + 1);
  return clock_->Reserve(static_cast<int>(most));
}

void DeviceSpans::End(int number, Stream& stream, const Timeline::Span& span) {
  if (number < 0) return;
  clock_->End(number, stream);
  under_way_.push_back({.number = number, .span = span});
}

// A stream comes to its marks in their order: behind one that it has not passed none is looked at.
void DeviceSpans::Collect() {
  std::fill(waits_.begin(), waits_.end(), uint8_t{0});
  std::erase_if(under_way_, [this](UnderWay& each) {
    uint8_t& waits = waits_[static_cast<size_t>(each.span.track)];
    if (waits != 0) return false;
    SpanClock::Span times;
    const SpanClock::State state = clock_->Take(each.number, times);
    waits = state == SpanClock::State::kUnderWay ? 1 : 0;
    if (waits != 0) return false;
    if (state == SpanClock::State::kOver) {
      each.span.begin_ns = times.begin_ns;
      each.span.end_ns = times.end_ns;
      timeline_.Add(each.span);
    }
    return true;
  });
}

}  // namespace ebb
