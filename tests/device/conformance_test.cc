// Rules for the streams of every kind of device. Events, host streams and memory have files of
// their own beside this one.
#include "conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "allocation_counter.h"
#include "ebb/runtime/device/cores.h"
#include "tests/status.h"

namespace ebb::conformance_test {
namespace {

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

// Queues of every length around that of a block, filled and emptied alternately.
TEST_P(DeviceConformance, StreamRunsTasksInOrderHoweverManyItHolds) {
  for (const int tasks_max : {1, 2, 63, 64, 65, 127, 128, 129, 1'000}) {
    ASSERT_OK_AND_ASSIGN(Stream stream, device_->NewStream("test", tasks_max));
    std::vector<int> order;
    const int tasks = 5 * tasks_max + 300;
    order.reserve(static_cast<size_t>(tasks));
    for (int i = 0; i < tasks; ++i) {
      if (i % (tasks_max + 17) == 0) stream.WaitIdle();
      stream.Enqueue([&order, i] { order.push_back(i); });
    }
    stream.WaitIdle();
    ASSERT_EQ(order.size(), static_cast<size_t>(tasks)) << tasks_max;
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end())) << tasks_max;
  }
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

// Room for many tasks takes no memory until so many wait.
TEST_P(DeviceConformance, AStreamTakesMemoryForTasksThatWaitOnly) {
  if (!on_cpu()) GTEST_SKIP() << "its queue is the driver's";
  constexpr int kTasksMax = 1 << 19;
  constexpr int64_t kBytes = kTasksMax * static_cast<int64_t>(sizeof(Task));
  const int64_t before = ResidentBytes();
  ASSERT_OK_AND_ASSIGN(Stream stream, device_->NewStream("test", kTasksMax));
  int64_t ran = 0;
  for (int i = 0; i < 2 * kTasksMax; ++i) {
    stream.Enqueue([&ran] { ++ran; });
    if (i % 1'000 == 0) stream.WaitIdle();
  }
  stream.WaitIdle();
  EXPECT_EQ(ran, 2 * kTasksMax);
  EXPECT_LT(ResidentBytes() - before, kBytes / 4);
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

TEST_P(DeviceConformance, FullStreamBlocksTheEnqueuer) {
  constexpr int kTasksMax = 64;  // far fewer than CUDA's own queues hold before they block
  Gate gate;
  std::atomic<int> enqueued{0};
  int ran = 0, most_waiting = 0;
  Stream stream = NewStream(*device_, "small", kTasksMax);
  stream.Enqueue([&] { gate.Wait(); });
  std::thread enqueuer([&] {
    for (int i = 0; i < 3 * kTasksMax; ++i) {
      stream.Enqueue([&] { most_waiting = std::max(most_waiting, enqueued.load() - ran++); });
      // Once the stream could be full, the gate opens: from here on it is emptied while it is
      // filled.
      if (enqueued.fetch_add(1) + 2 == kTasksMax) gate.Open();
    }
  });
  enqueuer.join();
  stream.WaitIdle();
  EXPECT_EQ(ran, 3 * kTasksMax);
  EXPECT_LE(most_waiting, kTasksMax);
}

TEST_P(DeviceConformance, DestructorRunsEnqueuedWork) {
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

TEST_P(DeviceConformance, EnqueuingAllocatesNothing) {
  const Buffer source = *device_->AllocateShared(1000, "test"),
               destination = *device_->AllocateShared(1000, "test");
  Event event = NewEvent();
  Stream first = NewStream(), second = NewStream();
  const int64_t before = ebb::testing::Allocations();
  for (int i = 0; i < 2 * kStreamTasksMax; ++i) {
    first.Copy(destination.data(), source.data(), 1000);
    first.Zero(destination.data(), 1000);
    first.Enqueue([&destination, i] { *destination.data() = static_cast<std::byte>(i); });
    first.Record(event);
    second.Wait(event);
  }
  second.WaitIdle();
  first.WaitIdle();
  EXPECT_EQ(ebb::testing::Allocations() - before, 0);
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
}  // namespace ebb::conformance_test
