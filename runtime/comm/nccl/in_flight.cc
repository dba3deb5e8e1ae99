#include "ebb/runtime/comm/nccl/in_flight.h"

#include <thread>
#include <utility>

#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

constexpr std::chrono::microseconds kPauseWhileFull{200};

}  // namespace

absl::StatusOr<std::unique_ptr<InFlight>> InFlight::Create(const Device& device) {
  std::vector<Operation> ring;
  ring.reserve(kOperationsMax);
  for (size_t i = 0; i < kOperationsMax; ++i) {
    EBB_ASSIGN_OR_RETURN(Event begin, device.NewEvent());
    EBB_ASSIGN_OR_RETURN(Event end, device.NewEvent());
    ring.push_back({.begin = std::move(begin),
                    .end = std::move(end),
                    .call = {},
                    .collective = 0,
                    .seen_running = {}});
  }
  return std::unique_ptr<InFlight>(new InFlight(std::move(ring)));
}

void InFlight::Begin(Stream& stream, const CallSummary& call, uint64_t collective) {
  for (;;) {
    {
      const std::scoped_lock lock(mutex_);
      RetireLocked();
      if (enqueued_ - retired_ < kOperationsMax) break;
    }
    std::this_thread::sleep_for(kPauseWhileFull);
  }
  if (enqueued_ > 0 && last_stream_ != stream.view().native) stream.Wait(At(enqueued_ - 1).end);
  last_stream_ = stream.view().native;
  Operation& operation = At(enqueued_);
  operation.call = call;
  operation.collective = collective;
  operation.seen_running.reset();
  stream.Record(operation.begin);
}

void InFlight::End(Stream& stream) {
  stream.Record(At(enqueued_).end);
  const std::scoped_lock lock(mutex_);
  ++enqueued_;
}

void InFlight::RetireLocked() {
  while (retired_ < enqueued_ && At(retired_).end.Passed()) ++retired_;
}

bool InFlight::empty() {
  const std::scoped_lock lock(mutex_);
  RetireLocked();
  return retired_ == enqueued_;
}

uint64_t InFlight::collective() {
  const std::scoped_lock lock(mutex_);
  return retired_ == enqueued_ ? 0 : At(retired_).collective;
}

std::optional<CallSummary> InFlight::Late(double seconds) {
  const std::scoped_lock lock(mutex_);
  RetireLocked();
  if (retired_ == enqueued_) return {};
  Operation& oldest = At(retired_);
  if (!oldest.begin.Passed()) return {};
  const Clock::time_point now = Clock::now();
  if (!oldest.seen_running) oldest.seen_running = now;
  if (now - *oldest.seen_running < std::chrono::duration<double>(seconds)) return {};
  return oldest.call;
}

}  // namespace ebb
