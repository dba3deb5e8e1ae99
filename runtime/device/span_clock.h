// When a device's streams come to certain places, told by the device itself: pairs of marks on a stream,
// which neither stop it nor call the host. Times are in nanoseconds of the steady clock, as
// Timeline::NowNs. What follows on one stream follows in them, too.
//
// CUDA: events that keep their time, which is the device's. One event that the host waited for ties it
// to the steady clock: times are late by less than the shortest of several such waits, some microseconds,
// and later also by what the two clocks drift apart, parts in a million. CUDA gives them in fp32
// milliseconds: a minute after the clock was made they come in steps of 4 us.
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
  // From now on that many pairs can be in use at once. Allocates.
  virtual absl::Status Reserve(int pairs) = 0;
  // Marks the begin of a pair that is in no use; its number, -1: all are in use.
  virtual int Begin(Stream& stream) = 0;
  virtual void End(int pair, Stream& stream) = 0;
  // Unless it is under way, `pair` is in no use any more. Does not wait.
  virtual State Take(int pair, Span& span) = 0;
};

}  // namespace ebb
