// How the CUDA device starts, fails and is released, on the stand-in. ../device/conformance_test.cc
// has its normal work.
#include "ebb/runtime/device/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda_device.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/device/stream_priority.h"
#include "stand_in.h"
#include "tests/status.h"

namespace ebb::cuda_device {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Ne;
using ::testing::Not;

TEST_F(CudaDeviceTest, AMachineWithoutADriverIsAnError) {
  stand_in::SetDevices(0, cudaErrorInsufficientDriver);
  for (const absl::Status& status : {Device::Cuda().status(), Device::CudaDevices().status(),
                                     Device::FromName("cuda").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Message(status), AllOf(HasSubstr("no CUDA driver or device"),
                                       HasSubstr("insufficient"), HasSubstr("--device cpu")));
  }
  EXPECT_OK(Device::FromName("cpu"));
}

TEST_F(CudaDeviceTest, AMachineWithoutADeviceIsAnError) {
  stand_in::SetDevices(0);
  const absl::Status status = Device::Cuda().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), HasSubstr("CUDA_VISIBLE_DEVICES"));
}

TEST_F(CudaDeviceTest, DevicesAreFoundByNameAndLocalRank) {
  EXPECT_EQ(*Device::CudaDevices(), 2);
  EXPECT_EQ(Device::FromName("cpu", 0, 3)->description(), "CPU, 3 threads");
  EXPECT_EQ(Device::FromName("cuda", 1)->ordinal(), 1);
  EXPECT_EQ(Device::FromName("cuda", 3)->ordinal(), 1);
  EXPECT_EQ(Device::FromName("cuda:1")->ordinal(), 1);
  EXPECT_EQ(Device::FromName("cuda:1")->description(), "CUDA device 1 (stand-in)");
  EXPECT_EQ(Device::FromName("cuda:1")->kind(), DeviceKind::kCuda);
  EXPECT_THAT(Message(Device::FromName("cuda:2").status()),
              AllOf(HasSubstr("no CUDA device 2"), HasSubstr("sees 2")));
  for (const char* name : {"gpu", "", "cuda:", "cuda:x", "CPU"})
    EXPECT_EQ(Device::FromName(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
}

TEST_F(CudaDeviceTest, SaysHowMuchOfItsMemoryIsFree) {
  const Device device = *Device::Cuda();
  stand_in::SetFreeMemory(12'345);
  EXPECT_EQ(device.free_bytes(), 12'345);
  stand_in::FailCall("cudaMemGetInfo", cudaErrorInvalidValue);
  EXPECT_EQ(device.free_bytes(), std::nullopt);
  EXPECT_EQ(Device::Cpu(1).free_bytes(), std::nullopt);
}

TEST_F(CudaDeviceTest, StreamsHaveTheirPriority) {
  const Device device = *Device::Cuda();
  const auto has_priority = [](const Stream& stream) {
    return stand_in::HasPriority(static_cast<cudaStream_t>(stream.view().native));
  };
  EXPECT_TRUE(has_priority(*NewStream(device, "copy", kStreamTasksMax, StreamPriority::kFirst)));
  EXPECT_FALSE(has_priority(*NewStream(device, "gather", kStreamTasksMax, StreamPriority::kUsual)));
  EXPECT_FALSE(has_priority(*device.NewStream("reduce")));
}

TEST_F(CudaDeviceTest, TheCallerStreamIsTheTrainersOwn) {
  cudaStream_t trainers = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&trainers, cudaStreamNonBlocking, 0), cudaSuccess);
  {
    const Device device = *Device::Cuda(0, {trainers});
    Stream caller = device.CallerStream();
    EXPECT_EQ(caller.view().native, trainers);
    bool ran = false;
    caller.Enqueue([&] { ran = true; });
    caller.WaitIdle();
    EXPECT_TRUE(ran);
  }
  EXPECT_EQ(stand_in::Alive().streams, 1);
  cudaStreamDestroy(trainers);
}

TEST_F(CudaDeviceTest, WithoutATrainersStreamThereIsOneThatOutlivesTheDevice) {
  std::vector<Stream> callers;
  {
    const Device device = *Device::Cuda();
    callers.push_back(device.CallerStream());
    callers.push_back(device.CallerStream());
  }
  EXPECT_EQ(callers[0].view().native, callers[1].view().native);
  bool ran = false;
  callers[0].Enqueue([&] { ran = true; });
  callers[1].WaitIdle();
  EXPECT_TRUE(ran);
}

// Like ranks of other devices: threads that never chose a device.
template <class Body>
void OnAnotherThread(Body body) {
  std::thread(body).join();
}

TEST_F(CudaDeviceTest, NoContextIsMadeOnAnotherDeviceWhicheverThreadCalls) {
  std::vector<std::byte> memory(4096);
  std::optional<Device> device;
  std::optional<Buffer> buffer, shared;
  std::optional<LockedRange> locked;
  std::vector<Stream> streams, hosts;
  std::vector<Event> events;
  const auto expect_none = [](const char* after) {
    EXPECT_FALSE(stand_in::HasContext(0)) << after;
  };
  const auto call = [&](const char* what, auto body) {
    OnAnotherThread(body);
    expect_none(what);
  };
  call("Cuda", [&] { device = *Device::Cuda(1); });
  EXPECT_TRUE(stand_in::HasContext(1));
  call("Allocate", [&] { buffer = *device->Allocate(100, "test"); });
  call("AllocateShared", [&] { shared = *device->AllocateShared(100, "test"); });
  call("LockHostMemory", [&] { locked = *device->LockHostMemory(memory, "test"); });
  call("NewStream", [&] { streams.push_back(*device->NewStream("test")); });
  call("NewHostStream", [&] { hosts.push_back(*device->NewHostStream("test")); });
  call("NewEvent", [&] { events.push_back(*device->NewEvent()); });
  call("Zero", [&] { streams[0].Zero(buffer->data(), 100); });
  call("Copy", [&] { streams[0].Copy(buffer->data(), shared->data(), 100); });
  call("Enqueue", [&] { streams[0].Enqueue([] {}); });
  call("Record", [&] { streams[0].Record(events[0]); });
  call("Wait", [&] { streams[0].Wait(events[0]); });
  call("Event::Passed", [&] { events[0].Passed(); });
  call("Event::Wait", [&] { events[0].Wait(); });
  call("host Wait", [&] { hosts[0].Wait(events[0]); });
  call("host Record", [&] { hosts[0].Record(events[0]); });
  call("Wait for host", [&] { streams[0].Wait(events[0]); });
  call("WaitIdle", [&] { streams[0].WaitIdle(); });
  call("~Event", [&] { events.clear(); });
  call("~Stream", [&] { streams.clear(); });
  call("~host Stream", [&] { hosts.clear(); });
  call("~Buffer", [&] { buffer.reset(); });
  call("~Buffer, shared", [&] { shared.reset(); });
  call("~LockedRange", [&] { locked.reset(); });
  call("~Device", [&] { device.reset(); });
}

int CurrentDevice() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

TEST_F(CudaDeviceTest, ThreadKeepsTheDeviceThatItUses) {
  OnAnotherThread([] {
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    const Device device = *Device::Cuda(1);
    EXPECT_OK(device.NewEvent());
    EXPECT_EQ(CurrentDevice(), 0);
  });
}

TEST_F(CudaDeviceTest, ThreadThatUsesNoDeviceKeepsTheLast) {
  OnAnotherThread([] {
    const Device device = *Device::Cuda(1);
    EXPECT_EQ(CurrentDevice(), 1);
  });
}

TEST_F(CudaDeviceTest, AFailedAllocationNamesItsUseItsSizeAndTheFreeBytes) {
  const Device device = *Device::Cuda();
  stand_in::FailCall("cudaMalloc", cudaErrorMemoryAllocation);
  const absl::Status status = device.Allocate(12345, "the gather pool").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr("12345 bytes"), HasSubstr("the gather pool"),
                    HasSubstr("CUDA device 0 (stand-in)"), HasSubstr("4294967296 bytes are free")));
  EXPECT_OK(device.status());  // the device has not failed
  EXPECT_OK(device.Allocate(12345, "the gather pool"));
}

TEST_F(CudaDeviceTest, AnyFailureAtCreationIsAStatusAndLeavesNothing) {
  for (const char* function : {"cudaGetDeviceProperties", "cudaStreamCreateWithPriority"}) {
    for (const int nth : {1, 2}) {
      stand_in::FailCall(function, cudaErrorDevicesUnavailable, nth);
      if (const auto device = Device::Cuda();
          nth == 1 || std::string(function) != "cudaGetDeviceProperties") {
        EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable) << function << nth;
      }
      stand_in::Reset();
    }
  }
  const Device device = *Device::Cuda();
  stand_in::FailCall("cudaStreamCreateWithPriority", cudaErrorInvalidValue);
  EXPECT_THAT(Message(device.NewStream("gather").status()), HasSubstr("stream 'gather'"));
  stand_in::FailCall("cudaEventCreateWithFlags", cudaErrorInvalidValue);
  EXPECT_EQ(device.NewEvent().status().code(), absl::StatusCode::kInternal);
  stand_in::FailCall("cudaMemsetAsync", cudaErrorInvalidValue);
  EXPECT_THAT(Message(device.Allocate(10, "x").status()), HasSubstr("zeroing new memory"));
}

class CudaFailureTest : public CudaDeviceTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(CudaFailureTest, FailsAllStreamsForGoodAndTasksStillRunOnceInOrder) {
  const Device device = *Device::Cuda();
  const Buffer buffer = *device.Allocate(1000, "test");
  Event event = *device.NewEvent();
  Stream stream = *device.NewStream("gather"), other = *device.NewStream("other");
  std::vector<int> ran;
  const auto use_everything = [&](int begin) {
    stream.Enqueue([&ran, begin] { ran.push_back(begin); });
    stream.Zero(buffer.data(), 500);
    stream.Copy(buffer.data(), buffer.data() + 500, 500);
    stream.Record(event);
    stream.Wait(event);
    stream.Enqueue([&ran, begin] { ran.push_back(begin + 1); });
    event.Wait();
    event.Passed();
    stream.WaitIdle();
  };
  use_everything(0);
  EXPECT_OK(stream.status());
  stand_in::FailCall(GetParam(), cudaErrorIllegalAddress);
  use_everything(2);
  use_everything(4);

  const absl::Status status = stream.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr(GetParam()), HasSubstr("CUDA device 0 (stand-in)"),
                    HasSubstr("illegal memory access"), HasSubstr("compute-sanitizer")));
  EXPECT_EQ(other.status(), status);
  EXPECT_EQ(device.status(), status);
  EXPECT_EQ(device.NewStream("late").status(), status);
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4, 5}));
}

INSTANTIATE_TEST_SUITE_P(Calls, CudaFailureTest,
                         ::testing::Values("cudaLaunchHostFunc", "cudaMemsetAsync",
                                           "cudaMemcpyAsync", "cudaEventRecord",
                                           "cudaStreamWaitEvent", "cudaEventSynchronize",
                                           "cudaEventQuery", "cudaStreamSynchronize"),
                         [](const auto& test) { return std::string(test.param); });

TEST_F(CudaDeviceTest, TasksRunThatALostDeviceDrops) {
  const Device device = *Device::Cuda();
  std::atomic<bool> running{false}, go{false};
  std::vector<int> ran;
  Stream stream = *device.NewStream("test");
  stream.Enqueue([&] {
    running = true;
    running.notify_all();
    go.wait(false);
  });
  for (int i = 0; i < 100; ++i) stream.Enqueue([&ran, i] { ran.push_back(i); });
  running.wait(false);
  stand_in::LoseDevice(cudaErrorIllegalAddress);
  go = true;
  go.notify_all();
  stream.WaitIdle();
  EXPECT_EQ(stream.status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ran.size(), 100u);
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
}

TEST_F(CudaDeviceTest, EnqueuerDoesNotWaitForRoomOnALostDevice) {
  constexpr int kTasks = 2 * kStreamTasksMax;
  const Device device = *Device::Cuda();
  std::atomic<bool> go{false};
  std::atomic<int> enqueued{0};
  std::vector<int> ran;
  Stream stream = *device.NewStream("test");
  stream.Enqueue([&] { go.wait(false); });
  std::thread enqueuer([&] {
    for (int i = 0; i < kTasks; ++i) {
      stream.Enqueue([&ran, i] { ran.push_back(i); });
      ++enqueued;
      enqueued.notify_all();
    }
    stream.WaitIdle();
  });
  for (int seen = 0; seen < kStreamTasksMax - 1; seen = enqueued) enqueued.wait(seen);
  stand_in::LoseDevice(cudaErrorIllegalAddress);
  go = true;
  go.notify_all();
  enqueuer.join();
  EXPECT_EQ(ran.size(), static_cast<size_t>(kTasks));
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
}

// Host streams and locked memory of the CUDA device, on the stand-in.

using CudaHostStreamsTest = CudaDeviceTest;

TEST_F(CudaHostStreamsTest, HostStreamsNeedADriverThatWaitsForValues) {
  const Device device = *Device::Cuda();
  stand_in::HideStreamWaitValue();
  const absl::Status status = device.NewHostStream("update").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr("cuStreamWaitValue64"), HasSubstr("CUDA device 0 (stand-in)")));
  EXPECT_OK(device.status());
  stand_in::Reset();
  EXPECT_OK(device.NewHostStream("update"));
}

TEST_F(CudaHostStreamsTest, AFailedHostStreamOrLockNamesItsPurpose) {
  const Device device = *Device::Cuda();
  stand_in::FailCall("cudaHostAlloc", cudaErrorMemoryAllocation);
  EXPECT_EQ(device.NewHostStream("update").status().code(), absl::StatusCode::kResourceExhausted);
  stand_in::FailCall("cudaStreamCreateWithPriority", cudaErrorInvalidValue);
  EXPECT_THAT(Message(device.NewHostStream("update").status()), HasSubstr("stream 'update'"));
  std::vector<std::byte> memory(12345);
  stand_in::FailCall("cudaHostRegister", cudaErrorMemoryAllocation);
  const absl::Status status = device.LockHostMemory(memory, "the pinned pool").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("12345 bytes"), HasSubstr("the pinned pool"),
                                     HasSubstr("keep less in host memory")));
  EXPECT_OK(device.status());
  const LockedRange locked = *device.LockHostMemory(memory, "the pinned pool");
  EXPECT_EQ(stand_in::Alive().locked, 1);
}

// The device's threads make it resident, before CUDA, which would do it on one thread.
TEST_F(CudaHostStreamsTest, MemoryIsResidentBeforeItIsLocked) {
  constexpr int64_t kBytes = (int64_t{9} << 20) + 1;
  const Device device = *Device::Cuda();
  const Buffer memory = *AllocatePrivatePages(kBytes, "test");
  if (madvise(memory.data(), kBytes, MADV_POPULATE_WRITE) != 0)
    GTEST_SKIP() << "the system does not make pages resident when asked to";
  ASSERT_EQ(madvise(memory.data(), kBytes, MADV_DONTNEED), 0);
  const LockedRange locked = *device.LockHostMemory(memory.span(), "test");
  std::vector<unsigned char> resident(static_cast<size_t>(kBytes / sysconf(_SC_PAGESIZE) + 1));
  ASSERT_EQ(mincore(memory.data(), kBytes, resident.data()), 0);
  EXPECT_THAT(resident, Each(Ne(0)));
}

// An error that CUDA returns then is an earlier one. Left as its last error, the next launch would
// report it.
TEST_F(CudaHostStreamsTest, FreeingMemoryLeavesNoError) {
  const Device device = *Device::Cuda();
  std::vector<std::byte> memory(64);
  Buffer allocated = *device.Allocate(64, "test"), shared = *device.AllocateShared(64, "test");
  LockedRange locked = *device.LockHostMemory(memory, "test");
  for (const char* call : {"cudaFree", "cudaFreeHost", "cudaHostUnregister"})
    stand_in::FailCall(call, cudaErrorIllegalAddress);
  allocated = Buffer();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  shared = Buffer();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  locked = LockedRange();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaHostStreamsTest, LeavesACoreToTheTrainer) {
  const Device device = *Device::Cuda();
  EXPECT_EQ(device.CallerStream().team().threads(), std::max(CoreShare::CoresPerRank() - 1, 1));
}

TEST_F(CudaHostStreamsTest, MoreHostStreamsThanCountsOfOnePage) {
  constexpr size_t kStreams = 100;
  const Device device = *Device::Cuda();
  Stream last = *device.NewStream("last");
  std::atomic<size_t> ran{0};
  size_t seen = 0;
  {
    std::vector<Stream> hosts;
    std::vector<Event> events;
    for (size_t i = 0; i < kStreams; ++i) {
      hosts.push_back(*device.NewHostStream("host"));
      events.push_back(*device.NewEvent());
      hosts.back().Enqueue([&] { ++ran; });
      hosts.back().Record(events.back());
      last.Wait(events.back());
    }
    last.Enqueue([&] { seen = ran; });
  }
  last.WaitIdle();
  EXPECT_EQ(seen, kStreams);
}

TEST_F(CudaHostStreamsTest, LostDeviceWakesHostStreamsThatWaitForIt) {
  const Device device = *Device::Cuda();
  std::atomic<bool> running{false}, go{false};
  std::vector<int> ran;
  Event computed = *device.NewEvent(), updated = *device.NewEvent();
  {
    Stream stream = *device.NewStream("device"), waiting = *device.NewStream("waiting");
    Stream host = *device.NewHostStream("host");
    stream.Enqueue([&] {
      running = true;
      running.notify_all();
      go.wait(false);
    });
    stream.Record(computed);
    host.Wait(computed);
    host.Enqueue([&ran] { ran.push_back(1); });
    host.Record(updated);
    waiting.Wait(updated);
    running.wait(false);
    stand_in::LoseDevice(cudaErrorIllegalAddress);
    updated.Wait();  // although the device's own task still runs
    EXPECT_EQ(host.status().code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(computed.Passed());
    EXPECT_TRUE(updated.Passed());
    host.Wait(computed);
    host.Enqueue([&ran] { ran.push_back(2); });
    host.Record(updated);
    host.WaitIdle();
    EXPECT_TRUE(updated.Passed());
    EXPECT_EQ(device.NewHostStream("late").status(), device.status());
    go = true;
    go.notify_all();
  }
  EXPECT_EQ(ran, (std::vector<int>{1, 2}));
}

// A call of CUDA might wait for the driver, and the driver for the device, which waits for these
// threads.
TEST_F(CudaHostStreamsTest, ThreadsOfHostStreamsNeverCallCudaWhileTheyWait) {
  const Device device = *Device::Cuda();
  Stream stream = *device.NewStream("device"), host = *device.NewHostStream("waiting host");
  Event computed = *device.NewEvent(), updated = *device.NewEvent();
  std::atomic<bool> go{false};
  stream.Enqueue([&] { go.wait(false); });
  stream.Record(computed);
  stand_in::ForgetCallers();
  host.Wait(computed);
  host.Record(updated);
  stream.Wait(updated);
  // Until the watch has asked for the device's state.
  while (stand_in::Callers("cudaStreamQuery").empty()) std::this_thread::yield();
  go = true;
  go.notify_all();
  stream.WaitIdle();
  EXPECT_THAT(stand_in::Callers("cudaStreamQuery"), ElementsAre("ebb cuda watch"));
  EXPECT_THAT(stand_in::Callers(), Not(Contains("waiting host")));
}

class CudaHostFailureTest : public CudaHostStreamsTest,
                            public ::testing::WithParamInterface<const char*> {};

TEST_P(CudaHostFailureTest, FailsTheDeviceAndHostTasksStillRunOnceInOrder) {
  const Device device = *Device::Cuda();
  std::vector<int> ran;
  {
    Stream stream = *device.NewStream("device"), host = *device.NewHostStream("host");
    Event event = *device.NewEvent();
    std::atomic<bool> go{false};
    stand_in::FailCall(GetParam(), cudaErrorIllegalAddress);
    for (int lap = 0; lap < 3; ++lap) {
      stream.Record(event);
      host.Wait(event);
      host.Enqueue([&, lap] {
        go.wait(false);
        ran.push_back(lap);
      });
      host.Record(event);
      stream.Wait(event);
    }
    go = true;
    go.notify_all();
    event.Wait();
    host.WaitIdle();
    stream.WaitIdle();
    EXPECT_THAT(Message(host.status()),
                AllOf(HasSubstr(GetParam()), HasSubstr("illegal memory access")));
    EXPECT_EQ(stream.status(), host.status());
  }
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2}));
}

INSTANTIATE_TEST_SUITE_P(Calls, CudaHostFailureTest,
                         ::testing::Values("cudaEventRecord", "cudaStreamWaitEvent",
                                           "cudaLaunchHostFunc", "cuStreamWaitValue64",
                                           "cudaStreamSynchronize"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace ebb::cuda_device
