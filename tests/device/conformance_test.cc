// What every kind of device must do: streams, events, buffers. A backend joins by a line in
// Backends().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "allocation_counter.h"
#include "ebb/runtime/device/cpu/core_share.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {
namespace {

using ::testing::HasSubstr;

// Which streams a test is run with: the device's, host streams, or both in turn.
enum class Streams : uint8_t { kOfDevice, kOfHost, kDeviceFirst, kHostFirst };

struct Backend {
  std::string name;
  std::function<absl::StatusOr<Device>()> make;
  Streams streams = Streams::kOfDevice;
};
void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

std::vector<Backend> Backends() {
  std::vector<Backend> backends = {
      {"cpu_1_thread", [] { return Device::Cpu(1); }},
      {"cpu_3_threads", [] { return Device::Cpu(3); }},
      {"cpu_of_host", [] { return Device::Cpu(1); }, Streams::kOfHost}};
  if (absl::IsUnimplemented(Device::CudaDevices().status())) return backends;
  const auto cuda = [] { return Device::Cuda(); };
  backends.push_back({"cuda", cuda});
  backends.push_back({"cuda_of_host", cuda, Streams::kOfHost});
  backends.push_back({"cuda_device_first", cuda, Streams::kDeviceFirst});
  backends.push_back({"cuda_host_first", cuda, Streams::kHostFirst});
  return backends;
}

// Opened once; tasks wait for it.
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
    // A build with CUDA has to pass on machines without a device.
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
  Stream NewStream(const Device& device, std::string_view name) {
    const Streams streams = GetParam().streams;
    const bool first = made_++ % 2 == 0;
    const bool on_host = streams == Streams::kOfHost ||
                         streams == (first ? Streams::kHostFirst : Streams::kDeviceFirst);
    return on_host ? *device.NewHostStream(name) : *device.NewStream(name);
  }
  Stream NewStream(std::string_view name = "test") { return NewStream(*device_, name); }
  Event NewEvent() { return *device_->NewEvent(); }

  // Memory of the device is reached by copies only.
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

  // What streams of the host reach too, where there are any.
  Buffer Allocate(int64_t bytes) {
    return of_device() ? *device_->Allocate(bytes, "test")
                       : *device_->AllocateShared(bytes, "test");
  }

  std::optional<Device> device_;

 private:
  int made_ = 0;
};

TEST_P(DeviceConformance, StreamRunsTasksInOrder) {
  constexpr int kTasks = 3 * kStreamTasksMax;
  std::vector<int> order;
  order.reserve(kTasks);
  Stream stream = NewStream();
  for (int i = 0; i < kTasks; ++i) stream.Enqueue([&order, i] { order.push_back(i); });
  stream.WaitIdle();
  ASSERT_EQ(order.size(), static_cast<size_t>(kTasks));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_P(DeviceConformance, StreamRunsBesideTheCaller) {
  Gate gate;
  std::atomic<bool> ran{false};
  Stream stream = NewStream();
  stream.Enqueue([&] {
    gate.Wait();
    ran.store(true);
  });
  EXPECT_FALSE(ran.load());
  gate.Open();
  stream.WaitIdle();
  EXPECT_TRUE(ran.load());
}

TEST_P(DeviceConformance, StreamsRunBesideEachOther) {
  if (!tasks_may_wait()) GTEST_SKIP() << "the host tasks of several streams may share a thread";
  Gate first_started, second_started;
  Stream first = NewStream(), second = NewStream();
  first.Enqueue([&] {
    first_started.Open();
    second_started.Wait();
  });
  second.Enqueue([&] {
    second_started.Open();
    first_started.Wait();
  });
  first.WaitIdle();
  second.WaitIdle();
}

TEST_P(DeviceConformance, WaitOrdersTwoStreams) {
  Gate gate;
  std::atomic<int> value{0};
  int seen = -1;
  Event event = NewEvent();
  Stream producer = NewStream(), consumer = NewStream();
  producer.Enqueue([&] {
    gate.Wait();
    value.store(7);
  });
  producer.Record(event);
  consumer.Wait(event);
  consumer.Enqueue([&] { seen = value.load(); });
  EXPECT_FALSE(event.Passed());
  gate.Open();
  consumer.WaitIdle();
  EXPECT_TRUE(event.Passed());
  EXPECT_EQ(seen, 7);
}

TEST_P(DeviceConformance, HostWaitsForAnEvent) {
  std::atomic<int> value{0};
  Event event = NewEvent();
  Stream stream = NewStream();
  stream.Enqueue([&] { value.store(1); });
  stream.Record(event);
  event.Wait();
  EXPECT_EQ(value.load(), 1);
}

TEST_P(DeviceConformance, EventThatWasNeverRecordedHasPassed) {
  Event event = NewEvent();
  EXPECT_TRUE(event.Passed());
  event.Wait();
  Stream stream = NewStream();
  stream.Wait(event);
  stream.WaitIdle();
}

TEST_P(DeviceConformance, WaitIsForTheRecordBeforeItNotForALaterOne) {
  if (!tasks_may_wait()) GTEST_SKIP() << "the host tasks of several streams may share a thread";
  Gate later;
  Event event = NewEvent();
  Stream recorder = NewStream(), waiter = NewStream();
  std::atomic<int> ran{0};
  recorder.Record(event);
  waiter.Wait(event);
  waiter.Enqueue([&] { ran.store(1); });
  recorder.Enqueue([&] { later.Wait(); });
  recorder.Record(event);
  waiter.WaitIdle();  // would hang if it waited for the second record
  EXPECT_EQ(ran.load(), 1);
  EXPECT_FALSE(event.Passed());
  later.Open();
  event.Wait();
}

TEST_P(DeviceConformance, RecordOnAnotherStreamDoesNotReleaseEarlierWaiters) {
  Gate gate;
  std::atomic<bool> first_done{false};
  bool waited = false;
  Event event = NewEvent();
  Stream first = NewStream(), second = NewStream(), waiter = NewStream();
  first.Enqueue([&] {
    gate.Wait();
    first_done.store(true);
  });
  first.Record(event);
  waiter.Wait(event);
  waiter.Enqueue([&] { waited = first_done.load(); });
  second.Record(event);
  event.Wait();  // for the second stream only
  EXPECT_FALSE(first_done.load());
  gate.Open();
  waiter.WaitIdle();
  EXPECT_TRUE(waited);
}

TEST_P(DeviceConformance, EventMayBeDestroyedOnceWaitsAreEnqueued) {
  Gate gate;
  std::atomic<bool> done{false};
  bool waited = false;
  Stream recorder = NewStream(), waiter = NewStream();
  {
    Event event = NewEvent();
    recorder.Enqueue([&] {
      gate.Wait();
      done.store(true);
    });
    recorder.Record(event);
    waiter.Wait(event);
  }
  waiter.Enqueue([&] { waited = done.load(); });
  gate.Open();
  waiter.WaitIdle();
  EXPECT_TRUE(waited);
}

TEST_P(DeviceConformance, EventOutlivesItsStreamAndItsDevice) {
  std::optional<Device> device = *GetParam().make();
  Event event = *device->NewEvent();
  {
    Stream stream = NewStream(*device, "short");
    stream.Record(event);
  }
  {
    Stream stream = NewStream(*device, "next");  // may inherit what the first one left
    EXPECT_TRUE(event.Passed());
    stream.Wait(event);
  }
  device.reset();
  event.Wait();
  EXPECT_TRUE(event.Passed());
}

TEST_P(DeviceConformance, EventsAreRecordedAgainAndAgain) {
  int64_t ping = 0,
          pong = 0;  // each written by one stream, read by the other, ordered by the events alone
  bool ordered = true;
  Event pinged = NewEvent(), ponged = NewEvent();
  Stream first = NewStream(), second = NewStream();
  for (int i = 1; i <= 2000; ++i) {
    first.Wait(ponged);
    first.Enqueue([&, i] {
      ordered = ordered && pong == i - 1;
      ping = i;
    });
    first.Record(pinged);
    second.Wait(pinged);
    second.Enqueue([&, i] {
      ordered = ordered && ping == i;
      pong = i;
    });
    second.Record(ponged);
  }
  second.WaitIdle();
  first.WaitIdle();
  EXPECT_TRUE(ordered);
  EXPECT_EQ(pong, 2000);
}

TEST_P(DeviceConformance, FullStreamBlocksTheEnqueuer) {
  Gate gate;
  std::atomic<int> enqueued{0};
  int ran = 0, most_waiting = 0;
  Stream stream = NewStream();
  stream.Enqueue([&] { gate.Wait(); });
  std::thread enqueuer([&] {
    for (int i = 0; i < 3 * kStreamTasksMax; ++i) {
      stream.Enqueue([&] { most_waiting = std::max(most_waiting, enqueued.load() - ran++); });
      // Once the stream could be full, the gate opens: from here on it drains while it is filled.
      if (enqueued.fetch_add(1) + 2 == kStreamTasksMax) gate.Open();
    }
  });
  enqueuer.join();
  stream.WaitIdle();
  EXPECT_EQ(ran, 3 * kStreamTasksMax);
  EXPECT_LE(most_waiting, kStreamTasksMax);
}

TEST_P(DeviceConformance, DestructorRunsWhatWasEnqueued) {
  Gate gate;
  std::atomic<int> ran{0};
  std::thread opener;
  {
    Stream stream = NewStream();
    stream.Enqueue([&] { gate.Wait(); });
    for (int i = 0; i < 100; ++i) stream.Enqueue([&] { ran.fetch_add(1); });
    opener = std::thread([&] { gate.Open(); });
  }
  EXPECT_EQ(ran.load(), 100);
  opener.join();
}

TEST_P(DeviceConformance, CallerStreamIsTheCallingThread) {
  if (!on_cpu()) GTEST_SKIP() << "the caller's stream is the trainer's on other devices";
  Stream caller = device_->CallerStream();
  Event event = NewEvent();
  std::thread::id thread;
  caller.Enqueue([&] { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
  caller.Record(event);
  EXPECT_TRUE(event.Passed());

  std::atomic<int> value{0};
  Stream stream = NewStream();
  stream.Enqueue([&] { value.store(3); });
  stream.Record(event);
  caller.Wait(event);
  EXPECT_EQ(value.load(), 3);
  caller.WaitIdle();
}

TEST_P(DeviceConformance, CopiesAndZeroes) {
  constexpr int64_t kLarge = (int64_t{17} << 20) + 13;  // takes the path past the caches
  Buffer source = Allocate(kLarge + 64), destination = Allocate(kLarge + 64);
  std::vector<std::byte> values(static_cast<size_t>(source.bytes()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::byte>((i * 7 + i / 251) & 0xff);
  Write(source.data(), values);
  Stream caller = device_->CallerStream(), beside = NewStream();
  for (Stream* stream : {&caller, &beside}) {
    for (const int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{4097}, int64_t{3} << 20, kLarge}) {
      for (const int64_t shift : {0, 5, 33}) {
        stream->Zero(destination.data(), destination.bytes());
        stream->Copy(destination.data() + shift, source.data() + 3, bytes);
        stream->WaitIdle();
        const std::vector<std::byte> copied = Read(destination.data(), shift + bytes + 1);
        EXPECT_EQ(std::memcmp(copied.data() + shift, values.data() + 3, static_cast<size_t>(bytes)),
                  0);
        EXPECT_EQ(copied.back(), std::byte{0}) << bytes;
        if (shift > 0) {
          EXPECT_EQ(copied[static_cast<size_t>(shift - 1)], std::byte{0}) << bytes;
        }
      }
    }
  }
}

TEST_P(DeviceConformance, BuffersAreZeroFilledAndAligned) {
  for (const int64_t bytes : {int64_t{1}, int64_t{4096}, int64_t{100'000}, (int64_t{2} << 20) - 1,
                              int64_t{2} << 20, (int64_t{5} << 20) + 12345}) {
    const Buffer buffer = *device_->Allocate(bytes, "test");
    EXPECT_EQ(buffer.bytes(), bytes);
    const uintptr_t alignment = !on_cpu()                   ? 256
                                : bytes >= int64_t{2} << 20 ? uintptr_t{2} << 20
                                                            : 4096;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u) << bytes;
    const std::vector<std::byte> values = Read(buffer.data(), bytes);
    EXPECT_TRUE(
        std::all_of(values.begin(), values.end(), [](std::byte b) { return b == std::byte{0}; }));
    // The next one, which may get this memory, is zero all the same.
    Write(buffer.data(), std::vector<std::byte>(static_cast<size_t>(bytes), std::byte{1}));
  }
  EXPECT_EQ(device_->Allocate(0, "nothing")->bytes(), 0);
}

TEST_P(DeviceConformance, SharedMemoryIsTheHostsAndTheDevices) {
  constexpr int64_t kBytes = 3 * 4096;
  const Buffer shared = *device_->AllocateShared(kBytes, "shared");
  const Buffer memory = Allocate(kBytes);
  EXPECT_EQ(Read(shared.data(), kBytes), std::vector<std::byte>(kBytes));
  for (const std::byte value : shared.span()) EXPECT_EQ(value, std::byte{0});
  std::fill(shared.span().begin(), shared.span().end(), std::byte{7});
  Stream stream = NewStream();
  stream.Copy(memory.data(), shared.data(), kBytes);
  stream.Zero(shared.data(), kBytes);
  stream.WaitIdle();
  EXPECT_EQ(Read(memory.data(), kBytes), std::vector<std::byte>(kBytes, std::byte{7}));
  for (const std::byte value : shared.span()) EXPECT_EQ(value, std::byte{0});
  EXPECT_FALSE(device_->AllocateShared(-1, "shared").ok());
}

TEST_P(DeviceConformance, LockedHostMemoryIsCopiedFromAndTo) {
  constexpr int64_t kBytes = 3 * 4096;
  std::vector<std::byte> host(kBytes, std::byte{7});
  const Buffer memory = Allocate(kBytes);
  for (int lap = 0; lap < 2; ++lap) {  // locked again once it is not
    LockedRange locked = *device_->LockHostMemory(host, "test");
    EXPECT_EQ(locked.span().data(), host.data());
    EXPECT_EQ(locked.span().size(), host.size());
    const LockedRange moved = std::move(locked);
    Stream stream = NewStream();
    stream.Copy(memory.data(), moved.span().data(), kBytes);
    stream.Zero(memory.data(), 1);
    stream.Copy(moved.span().data(), memory.data(), kBytes);
    stream.WaitIdle();
    EXPECT_EQ(host.front(), std::byte{0});
    EXPECT_EQ(host.back(), std::byte{7});
    host.front() = std::byte{7};
  }
  EXPECT_TRUE(device_->LockHostMemory({}, "nothing")->span().empty());
}

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
  host.Enqueue([&] { started.Wait(); });  // so that the wait's turn comes after the second record
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
  // Goes on with what the first one left.
  Stream third = *device_->NewHostStream("third");
  Event event = NewEvent();
  third.Record(event);
  device.Wait(event);
  second.reset();
  device.WaitIdle();
  EXPECT_TRUE(first_waited);
  EXPECT_TRUE(second_waited);
}

TEST_P(DeviceConformance, ImpossibleAllocationsSayWhatAndHowMuch) {
  for (const int64_t bytes :
       {int64_t{1} << 46, int64_t{1} << 50, std::numeric_limits<int64_t>::max()}) {
    const absl::Status status = device_->Allocate(bytes, "optimizer states").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("optimizer states"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(bytes)));
  }
  EXPECT_EQ(device_->Allocate(-1, "x").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(DeviceConformance, ReleasedBufferIsPoisonedInDebugBuilds) {
  if (!kPoisonReleased) GTEST_SKIP() << "release build";
  if (!on_cpu()) GTEST_SKIP() << "released memory of a GPU cannot be looked at";
  for (const int64_t bytes : {int64_t{1000}, int64_t{3} << 20}) {
    Buffer buffer = *device_->Allocate(bytes, "test");
    // Through a volatile copy of the address: the compiler may assume that nobody looks at released
    // memory.
    std::byte* volatile address = buffer.data();
    std::memset(buffer.data(), 1, static_cast<size_t>(bytes));
    { const Buffer released = std::move(buffer); }
    const std::byte* stale = address;
    EXPECT_TRUE(
        std::all_of(stale, stale + bytes, [](std::byte b) { return b == std::byte{kPoison}; }));
  }
}

TEST_P(DeviceConformance, EnqueuingAllocatesNothing) {
  std::array<std::byte, 1000> source = {}, destination = {};
  Event event = NewEvent();
  Stream first = NewStream(), second = NewStream();
  const int64_t before = ebb::testing::Allocations();
  for (int i = 0; i < 2 * kStreamTasksMax; ++i) {
    first.Copy(destination.data(), source.data(), 1000);
    first.Zero(destination.data(), 1000);
    first.Enqueue([&destination, i] { destination[0] = static_cast<std::byte>(i); });
    first.Record(event);
    second.Wait(event);
  }
  second.WaitIdle();
  first.WaitIdle();
  EXPECT_EQ(ebb::testing::Allocations() - before, 0);
}

TEST_P(DeviceConformance, SixtyFourStreamsAtOnce) {
  constexpr int kStreams = 64, kLaps = 20;
  int64_t passes = 0;  // handed from stream to stream by the events
  std::vector<Stream> streams;
  std::vector<Event> events;
  for (int i = 0; i < kStreams; ++i) {
    streams.push_back(NewStream("a name longer than the system keeps"));
    events.push_back(NewEvent());
  }
  for (int turn = 0; turn < kLaps * kStreams; ++turn) {
    const auto here = static_cast<size_t>(turn % kStreams),
               before = static_cast<size_t>((turn + kStreams - 1) % kStreams);
    streams[here].Wait(events[before]);
    streams[here].Enqueue([&passes] { ++passes; });
    streams[here].Record(events[here]);
  }
  for (Stream& stream : streams) stream.WaitIdle();
  EXPECT_EQ(passes, kLaps * kStreams);
}

TEST(CpuDevice, RanksOfOneMachineShareItsCores) {
  EXPECT_EQ(CoreShare::CoresPerRank(), CoreShare::Cores());
  {
    const CoreShare share(CoreShare::Cores() + 1);
    EXPECT_EQ(Device::Cpu().description(), "CPU, 1 thread");
    EXPECT_EQ(Device::Cpu(2).description(), "CPU, 2 threads");
  }
  EXPECT_EQ(CoreShare::CoresPerRank(), CoreShare::Cores());
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceConformance, ::testing::ValuesIn(Backends()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb
