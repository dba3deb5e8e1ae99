// Host streams and locked memory of the CUDA device, on the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "ebb/runtime/device/cpu/core_share.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"

namespace ebb::cuda_device {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Ne;
using ::testing::Not;

using CudaHostStreamsTest = CudaDeviceTest;

TEST_F(CudaHostStreamsTest, HostStreamsNeedADriverThatWaitsForValues) {
  const Device device = *Device::Cuda();
  stand_in::HideStreamWaitValue();
  const absl::Status status = device.NewHostStream("update").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr("cuStreamWaitValue64"), HasSubstr("CUDA device 0 (stand-in)")));
  EXPECT_TRUE(device.status().ok());
  stand_in::Reset();
  EXPECT_TRUE(device.NewHostStream("update").ok());
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
  EXPECT_TRUE(device.status().ok());
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

// Their call might wait for the driver, and the driver for the device, which waits for these
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
