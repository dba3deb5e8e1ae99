// Host streams beside a device's streams; the same events order both.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <vector>

#include "conformance.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::conformance_host_streams_test {
namespace {

TEST_P(DeviceConformance, HostStreamsTasksWaitAndComputeBesideEachOther) {
  Gate first_started, second_started;
  std::atomic<int64_t> sum{0};
  Stream first = *device_->NewHostStream("first"), second = *device_->NewHostStream("second");
  EXPECT_EQ(first.view().native, nullptr);
  first.Enqueue([&] {
    first_started.Open();
    second_started.Wait();
    first.team().Run(1000, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  });
  second.Enqueue([&] {
    second_started.Open();
    first_started.Wait();
  });
  first.WaitIdle();
  second.WaitIdle();
  EXPECT_EQ(sum.load(), 1000);
  EXPECT_TRUE(first.status().ok());
}

TEST_P(DeviceConformance, OrderIsHandedFromTheDeviceToTheHostAndBack) {
  constexpr int64_t kBytes = 4096;
  const Buffer memory = *device_->Allocate(kBytes, "memory");
  const Buffer shared = *device_->AllocateShared(kBytes, "shared");
  Stream stream = *device_->NewStream("device"), host = *device_->NewHostStream("host");
  Event computed = NewEvent(), updated = NewEvent();
  int wrong = 0;
  for (int lap = 0; lap < 200; ++lap) {
    stream.Copy(shared.data(), memory.data(), kBytes);
    stream.Record(computed);
    host.Wait(computed);
    host.Enqueue([&, lap] {
      for (std::byte& value : shared.span()) {
        wrong += value != static_cast<std::byte>(lap & 0xff);
        value = static_cast<std::byte>((lap + 1) & 0xff);
      }
    });
    host.Record(updated);
    stream.Wait(updated);
    stream.Copy(memory.data(), shared.data(), kBytes);
  }
  stream.WaitIdle();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(Read(memory.data(), kBytes),
            std::vector<std::byte>(kBytes, static_cast<std::byte>(200 & 0xff)));
}

TEST_P(DeviceConformance, HostStreamWaitsForTheDevicesRecordBeforeItNotForALaterOne) {
  Gate later, started;
  Event event = NewEvent();
  Stream device = *device_->NewStream("device"), slow = *device_->NewHostStream("slow"),
         host = *device_->NewHostStream("host");
  Event opened = NewEvent();
  bool ran = false;
  host.Enqueue([&] { started.Wait(); });  // so that the wait runs after the second record
  device.Record(event);
  host.Wait(event);
  host.Enqueue([&] { ran = true; });
  slow.Enqueue([&] { later.Wait(); });
  slow.Record(opened);
  device.Wait(opened);
  device.Record(event);
  started.Open();
  host.WaitIdle();  // would hang if it waited for the second record
  EXPECT_TRUE(ran);
  EXPECT_FALSE(event.Passed());
  later.Open();
  event.Wait();
  EXPECT_TRUE(event.Passed());
}

TEST_P(DeviceConformance, DeviceWaitsForTheHostsRecordBeforeItNotForALaterOne) {
  Gate later;
  Event event = NewEvent(), waited = NewEvent();
  Stream device = *device_->NewStream("device"), host = *device_->NewHostStream("host");
  host.Record(event);
  device.Wait(event);
  host.Enqueue([&] { later.Wait(); });
  host.Record(event);
  device.Record(waited);
  waited.Wait();  // would hang if the device waited for the second record
  EXPECT_FALSE(event.Passed());
  device.Wait(event);
  device.Record(waited);
  EXPECT_FALSE(waited.Passed());
  later.Open();
  waited.Wait();
  EXPECT_TRUE(event.Passed());
}

TEST_P(DeviceConformance, RecordOfTheOtherKindDoesNotReleaseEarlierWaiters) {
  Gate gate;
  std::atomic<bool> opened{false};
  Event event = NewEvent(), waited = NewEvent();
  Stream device = *device_->NewStream("device"), other = *device_->NewStream("other"),
         host = *device_->NewHostStream("host");
  host.Enqueue([&] {
    gate.Wait();
    opened = true;
  });
  host.Record(event);
  device.Wait(event);
  device.Record(waited);
  other.Record(event);
  event.Wait();  // for the other stream only
  EXPECT_FALSE(opened.load());
  EXPECT_FALSE(waited.Passed());
  gate.Open();
  waited.Wait();
  EXPECT_TRUE(opened.load());
}

TEST_P(DeviceConformance, EventIsRecordedOnBothKindsInTurn) {
  constexpr int kLaps = 3000;
  int64_t passes = 0;  // by all three in turn, ordered by the one event alone
  bool ordered = true;
  Event event = NewEvent();
  Stream device = *device_->NewStream("device"), host = *device_->NewHostStream("host"),
         second = *device_->NewHostStream("second");
  Stream* const turns[] = {&device, &host, &second};
  for (int turn = 0; turn < kLaps; ++turn) {
    Stream& stream = *turns[turn % 3];
    stream.Wait(event);
    stream.Enqueue([&, turn] { ordered = ordered && passes++ == turn; });
    stream.Record(event);
  }
  event.Wait();
  EXPECT_TRUE(ordered);
  EXPECT_EQ(passes, kLaps);
}

TEST_P(DeviceConformance, WaitsOfBothKindsOutliveEventsAndStreams) {
  Gate gate;
  std::atomic<bool> opened{false};
  bool first_waited = false, second_waited = false;
  Stream device = *device_->NewStream("device");
  std::optional<Stream> host = *device_->NewHostStream("host");
  host->Enqueue([&] {
    gate.Wait();
    opened = true;
  });
  {
    Event event = NewEvent();
    host->Record(event);
    device.Wait(event);
  }
  std::optional<Stream> second = *device_->NewHostStream("second");
  {
    Event event = NewEvent();
    device.Enqueue([&] { first_waited = opened; });
    device.Record(event);
    second->Wait(event);
  }
  second->Enqueue([&] { second_waited = opened; });
  gate.Open();
  host.reset();
  // Continues with the first one's state.
  Stream third = *device_->NewHostStream("third");
  Event event = NewEvent();
  third.Record(event);
  device.Wait(event);
  second.reset();
  device.WaitIdle();
  EXPECT_TRUE(first_waited);
  EXPECT_TRUE(second_waited);
}

}  // namespace
}  // namespace ebb::conformance_host_streams_test
