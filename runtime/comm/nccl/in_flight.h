// The operations of one communicator that have been enqueued and have not ended: how far they have
// come, and whether the oldest takes too long. An operation's time counts from when the device
// comes to it, because a host enqueues far ahead.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

class InFlight {
 public:
  static constexpr size_t kOperationsMax = 256;
  using Clock = std::chrono::steady_clock;

  static absl::StatusOr<std::unique_ptr<InFlight>> Create(const Device& device);

  // Around the enqueuing of an operation, by one thread. The operation runs after the one before
  // it, even if that one is on another stream. Begin waits while kOperationsMax are under way.
  // `collective`: its number, or 0.
  void Begin(Stream& stream, const CallSummary& call, uint64_t collective);
  void End(Stream& stream);

  // Any thread.
  bool empty();
  // The oldest operation, if the device has worked at it for longer than `seconds`. The time is
  // measured between calls of this function, so call it often.
  std::optional<CallSummary> Late(double seconds);
  uint64_t collective();  // the oldest operation's; 0 if there is none

 private:
  struct Operation {
    Event begin, end;
    CallSummary call;
    uint64_t collective = 0;
    std::optional<Clock::time_point> seen_running;
  };

  explicit InFlight(std::vector<Operation> ring) : ring_(std::move(ring)) {}
  Operation& At(uint64_t number) { return ring_[number % kOperationsMax]; }
  void RetireLocked();

  std::vector<Operation> ring_;
  void* last_stream_ = nullptr;
  std::mutex mutex_;
  uint64_t enqueued_ = 0, retired_ = 0;
};

}  // namespace ebb
