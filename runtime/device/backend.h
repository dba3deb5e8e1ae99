// The interface of a kind of device: three small classes. One conformance suite
// (tests/device/conformance_test.cc) says what every backend must do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/driver_memory.h"
#include "ebb/runtime/device/span_clock.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/device/stream_priority.h"

namespace ebb {

class EventBackend {
 public:
  virtual ~EventBackend() = default;
  virtual void HostWait() const = 0;
  virtual bool Passed() const = 0;
};

class StreamBackend {
 public:
  virtual ~StreamBackend() = default;
  virtual void Enqueue(const Task& task) = 0;
  virtual void Copy(void* destination, const void* source, int64_t bytes) = 0;
  virtual void Zero(void* destination, int64_t bytes) = 0;
  virtual void Wait(const EventBackend& event) = 0;  // an event of the same device
  virtual void Record(EventBackend& event) = 0;
  virtual void WaitIdle() = 0;
  virtual ThreadTeam& team() = 0;
  virtual StreamView view() const = 0;
  virtual absl::Status status() const { return absl::OkStatus(); }
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual DeviceKind kind() const = 0;
  virtual std::string description() const = 0;
  virtual int ordinal() const { return 0; }
  virtual uint64_t identity() const { return 0; }
  virtual absl::Status status() const { return absl::OkStatus(); }
  virtual std::optional<int64_t> free_bytes() const { return std::nullopt; }
  // Null: the device's memory is the host's.
  virtual DriverMemory* driver_memory() { return nullptr; }
  virtual absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                                   int tasks_max) = 0;
  // Default: all streams have equal priority.
  virtual absl::StatusOr<std::unique_ptr<StreamBackend>> NewStreamOf(StreamPriority /*priority*/,
                                                                     std::string_view name,
                                                                     int tasks_max) {
    return NewStream(name, tasks_max);
  }
  // Default: every stream's tasks may compute and wait.
  virtual absl::StatusOr<std::unique_ptr<StreamBackend>> NewHostStream(std::string_view name,
                                                                       int tasks_max) {
    return NewStream(name, tasks_max);
  }
  virtual std::unique_ptr<StreamBackend> CallerStream() = 0;
  virtual absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() = 0;
  // An event that threads of the host wait for, if the kind of device distinguishes them.
  virtual absl::StatusOr<std::unique_ptr<EventBackend>> NewAwaitedEvent() { return NewEvent(); }
  virtual absl::StatusOr<std::unique_ptr<SpanClock>> NewSpanClock() { return nullptr; }
  virtual absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) = 0;
  // Default: the device's memory is the host's, so any memory is shared.
  virtual absl::StatusOr<Buffer> AllocateShared(int64_t bytes, std::string_view what) {
    return Allocate(bytes, what);
  }
  // Default: copies from any host memory run beside the host, so nothing is locked.
  virtual absl::StatusOr<LockedRange> LockHostMemory(std::span<std::byte> memory,
                                                     std::string_view /*what*/) {
    return LockedRange(memory, [](void*, int64_t, int) {});
  }
};

}  // namespace ebb
