// When a device's streams come to certain places, measured by the device itself: pairs of marks on
// a stream, which neither stop it nor call the host. Times are in nanoseconds of the steady clock,
// as Timeline::NowNs. Times on one stream keep the stream's order.
//
// CUDA: events with times of the device's clock. The host waits for one event, which ties that
// clock to the steady clock. So times are late by less than the shortest of several such waits,
// some microseconds; later also by the drift of the two clocks, parts in a million. CUDA gives them
// in fp32 milliseconds: a minute after the clock was made they come in steps of 4 us.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ebb/runtime/device/stream.h"

namespace ebb {

class SpanClock {
 public:
  struct Span {
    int64_t begin_ns = 0, end_ns = 0;
  };
  enum class State { kUnderWay, kOver, kLost };  // lost: the device has failed

  virtual ~SpanClock() = default;
  // From now on that many pairs can be used at once. Allocates.
  virtual absl::Status Reserve(int pairs) = 0;
  // Marks the beginning of a free pair. Returns its number; -1: all are in use.
  virtual int Begin(Stream& stream) = 0;
  virtual void End(int pair, Stream& stream) = 0;
  // Frees `pair` unless it is under way. Does not wait.
  virtual State Take(int pair, Span& span) = 0;
};

}  // namespace ebb
