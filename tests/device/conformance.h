// The devices and helpers of the device's conformance tests, which are one program of several
// files. A backend joins by a line in Backends() of conformance_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

// The streams of a test: the device's, host streams, or both in turn.
enum class Streams : uint8_t { kOfDevice, kOfHost, kDeviceFirst, kHostFirst };

struct Backend {
  std::string name;
  std::function<absl::StatusOr<Device>()> make;
  Streams streams = Streams::kOfDevice;
};
inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

// Tasks wait for it; it is opened once.
class Gate {
 public:
  void Open() {
    open_.store(true);
    open_.notify_all();
  }
  void Wait() const { open_.wait(false); }
  bool open() const { return open_.load(); }

 private:
  std::atomic<bool> open_{false};
};

class DeviceConformance : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    auto device = GetParam().make();
    // A build with CUDA must pass on machines without a device.
    if (absl::IsUnavailable(device.status())) GTEST_SKIP() << device.status();
    ASSERT_TRUE(device.ok()) << device.status();
    device_.emplace(*std::move(device));
  }
  void TearDown() override {
    if (!device_) return;
    EXPECT_TRUE(device_->status().ok()) << device_->status();
  }

  bool on_cpu() const { return device_->kind() == DeviceKind::kCpu; }
  bool of_device() const { return GetParam().streams == Streams::kOfDevice; }
  bool tasks_may_wait() const { return on_cpu() || GetParam().streams == Streams::kOfHost; }
  Stream NewStream(const Device& device, std::string_view name, int tasks_max = kStreamTasksMax) {
    const Streams streams = GetParam().streams;
    const bool first = made_++ % 2 == 0;
    const bool on_host = streams == Streams::kOfHost ||
                         streams == (first ? Streams::kHostFirst : Streams::kDeviceFirst);
    return on_host ? *device.NewHostStream(name, tasks_max) : *device.NewStream(name, tasks_max);
  }
  Stream NewStream(std::string_view name = "test") { return NewStream(*device_, name); }
  Event NewEvent() { return *device_->NewEvent(); }

  // Only copies reach device memory.
  std::vector<std::byte> Read(const std::byte* data, int64_t bytes) {
    std::vector<std::byte> values(static_cast<size_t>(bytes), std::byte{0x5a});
    Stream stream = device_->CallerStream();
    stream.Copy(values.data(), data, bytes);
    stream.WaitIdle();
    return values;
  }
  void Write(std::byte* data, const std::vector<std::byte>& values) {
    Stream stream = device_->CallerStream();
    stream.Copy(data, values.data(), static_cast<int64_t>(values.size()));
    stream.WaitIdle();
  }

  // Memory that host streams reach too, if there are any.
  Buffer Allocate(int64_t bytes) {
    return of_device() ? *device_->Allocate(bytes, "test")
                       : *device_->AllocateShared(bytes, "test");
  }

  std::optional<Device> device_;

 private:
  int made_ = 0;
};

}  // namespace ebb
