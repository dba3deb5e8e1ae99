// Graphs captured from a stream, on the stand-in: the order of their operations, the calls that
// CUDA refuses under capture, and the state after an error.
#include "ebb/runtime/device/cuda/captured_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "ebb/runtime/device/device.h"
#include "order.h"
#include "stand_in.h"
#include "tests/status.h"

namespace ebb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CapturedGraphTest : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 64;

  void TearDown() override {
    stream_.WaitIdle();
    stand_in::Reset();
  }

  cudaStream_t native() const { return static_cast<cudaStream_t>(stream_.view().native); }
  absl::StatusOr<CapturedGraph> Capture(const std::function<absl::Status()>& enqueue) {
    return CapturedGraph::Capture(device_.ordinal(), native(), enqueue);
  }
  absl::Status Copy() {
    stream_.Copy(to_.data(), from_.data(), kBytes);
    return absl::OkStatus();
  }
  // The first number of `to_`, once the stream is idle.
  int First() {
    stream_.WaitIdle();
    return static_cast<int>(*to_.data());
  }
  void SetFirst(int value) { *from_.data() = static_cast<std::byte>(value); }
  bool StreamWorks() {
    SetFirst(77);
    EXPECT_OK(Copy());
    return First() == 77 && stream_.status().ok();
  }

  Device device_ = *Device::Cuda();
  Buffer from_ = *device_.AllocateShared(kBytes, "test"), to_ = *device_.Allocate(kBytes, "test");
  Stream stream_ = *device_.NewStream("test");
};

TEST_F(CapturedGraphTest, RunsWithTheContentsOfEachLaunchAndNotWhenItIsCaptured) {
  SetFirst(1);
  ASSERT_OK_AND_ASSIGN(const auto graph, Capture([&] { return Copy(); }));
  EXPECT_EQ(First(), 0);
  for (int value : {2, 3}) {
    SetFirst(value);
    ASSERT_EQ(graph.Launch(native()), cudaSuccess);
    EXPECT_EQ(First(), value);
  }
  EXPECT_EQ(stand_in::GraphLaunches(), 2);
}

TEST_F(CapturedGraphTest, RunsInStreamOrderWithAllOfItsOperations) {
  ASSERT_OK_AND_ASSIGN(const auto graph, Capture([&] {
                         stream_.Zero(to_.data(), kBytes);
                         stream_.Copy(to_.data() + 1, from_.data(), 1);
                         return absl::OkStatus();
                       }));
  SetFirst(9);
  EXPECT_OK(Copy());
  ASSERT_EQ(graph.Launch(native()), cudaSuccess);
  EXPECT_EQ(First(), 0);
  EXPECT_EQ(static_cast<int>(to_.data()[1]), 9);
}

TEST_F(CapturedGraphTest, MayGoWhileItRuns) {
  SetFirst(4);
  stand_in::HoldUntilHostWaits(native());
  {
    ASSERT_OK_AND_ASSIGN(const auto graph, Capture([&] { return Copy(); }));
    ASSERT_EQ(graph.Launch(native()), cudaSuccess);
  }
  EXPECT_EQ(stand_in::Alive().graphs, 0);
  EXPECT_EQ(First(), 4);
}

TEST_F(CapturedGraphTest, IsFreedOnceAfterAMove) {
  std::optional<CapturedGraph> kept;
  {
    ASSERT_OK_AND_ASSIGN(auto graph, Capture([&] { return Copy(); }));
    kept = std::move(graph);
  }
  EXPECT_EQ(stand_in::Alive().graphs, 1);
  SetFirst(5);
  ASSERT_EQ(kept->Launch(native()), cudaSuccess);
  EXPECT_EQ(First(), 5);
  *kept = *Capture([&] { return Copy(); });
  EXPECT_EQ(stand_in::Alive().graphs, 1);
  kept.reset();
  EXPECT_EQ(stand_in::Alive().graphs, 0);
}

TEST_F(CapturedGraphTest, AnErrorOfTheSequenceIsItsErrorAndNothingHasRun) {
  const absl::Status error = absl::InternalError("no such product");
  SetFirst(6);
  const auto graph = Capture([&] {
    EXPECT_OK(Copy());
    return error;
  });
  EXPECT_EQ(graph.status(), error);
  EXPECT_EQ(First(), 0);
  EXPECT_TRUE(StreamWorks());
  EXPECT_EQ(stand_in::Alive().graphs, 0);
}

TEST_F(CapturedGraphTest, EachStepThatFailsIsNamedAndLeavesTheStreamAsItWas) {
  for (const auto& [function, named] : {std::pair("cudaStreamBeginCapture", "beginning to capture"),
                                        {"cudaStreamEndCapture", "capturing a graph"},
                                        {"cudaGraphInstantiate", "instantiating a graph"},
                                        {"cudaGraphUpload", "uploading a graph"}}) {
    stand_in::FailCall(function, cudaErrorMemoryAllocation);
    const auto graph = Capture([&] { return Copy(); });
    EXPECT_EQ(graph.status().code(), absl::StatusCode::kResourceExhausted) << function;
    EXPECT_THAT(graph.status(), testing::Says(named));
    EXPECT_EQ(stand_in::Alive().graphs, 0) << function;
    EXPECT_TRUE(StreamWorks()) << function;
  }
}

TEST_F(CapturedGraphTest, ACallThatCudaRefusesUnderCaptureSpoilsIt) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  const cudaStream_t stream = native();
  struct Refusal {
    const char* call;
    cudaError_t expected;
    std::function<cudaError_t()> make;
  };
  void* unused = nullptr;
  cudaEvent_t unused_event = nullptr;
  cudaGraph_t unused_graph = nullptr;
  const Refusal refusals[] = {
      {"synchronize", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaStreamSynchronize(stream); }},
      {"query", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(stream); }},
      {"query an event", cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(event); }},
      {"wait for an event", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaEventSynchronize(event); }},
      {"malloc", cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&unused, kBytes); }},
      {"free", cudaErrorStreamCaptureUnsupported, [&] { return cudaFree(memory); }},
      {"host alloc", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaHostAlloc(&unused, kBytes, 0); }},
      {"an event", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaEventCreateWithFlags(&unused_event, cudaEventDisableTiming); }},
      {"a wait for what is not captured", cudaErrorStreamCaptureIsolation,
       [&] { return cudaStreamWaitEvent(stream, event, 0); }},
      {"a record", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaEventRecord(event, stream); }},
      {"a host function", cudaErrorStreamCaptureUnsupported,
       [&] {
         return cudaLaunchHostFunc(
             stream, [](void*) {}, nullptr);
       }},
      {"another capture", cudaErrorIllegalState,
       [&] { return cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal); }}};
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.call);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(refusal.make(), refusal.expected);
    const bool spoilt = refusal.expected != cudaErrorIllegalState;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    EXPECT_EQ(status, spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive);
    EXPECT_EQ(cudaMemsetAsync(to_.data(), 0, kBytes, stream),
              spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    EXPECT_EQ(cudaStreamEndCapture(stream, &unused_graph),
              spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    EXPECT_EQ(unused_graph == nullptr, spoilt);
    if (unused_graph != nullptr) cudaGraphDestroy(unused_graph);
    EXPECT_EQ(cudaStreamEndCapture(stream, &unused_graph), cudaErrorIllegalState);
    EXPECT_TRUE(StreamWorks());
  }
  cudaFree(memory);
  cudaEventDestroy(event);
}

TEST_F(CapturedGraphTest, OtherThreadsMayAllocateMeanwhile) {
  const auto graph = Capture([&] {
    std::thread([&] { EXPECT_OK(device_.Allocate(kBytes, "beside")); }).join();
    return Copy();
  });
  EXPECT_OK(graph);
}

TEST_F(CapturedGraphTest, AnotherThreadCannotEndIt) {
  ASSERT_EQ(cudaStreamBeginCapture(native(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  cudaGraph_t graph = nullptr;
  std::thread([&] {
    EXPECT_EQ(cudaStreamEndCapture(native(), &graph), cudaErrorStreamCaptureWrongThread);
  }).join();
  EXPECT_EQ(cudaStreamEndCapture(native(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
}

TEST_F(CapturedGraphTest, OrderIsCheckedAtTheLaunch) {
  stand_in::WatchOrder();
  const Buffer memory = *device_.Allocate(kBytes, "watched");
  Stream other = *device_.NewStream("other");
  Event event = *device_.NewEvent();
  ASSERT_OK_AND_ASSIGN(const auto graph, Capture([&] {
                         stream_.Zero(memory.data(), kBytes);
                         return absl::OkStatus();
                       }));
  // The captured work has touched nothing.
  other.Zero(memory.data(), kBytes);
  other.Record(event);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
  stream_.Wait(event);
  ASSERT_EQ(graph.Launch(native()), cudaSuccess);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
  std::thread([&] { stream_.WaitIdle(); }).join();
  other.Zero(memory.data(), kBytes);
  EXPECT_THAT(stand_in::TakeRaces(), ElementsAre(HasSubstr("cudaMemsetAsync")));
}

TEST_F(CapturedGraphTest, ALostDeviceRefusesItsLaunch) {
  ASSERT_OK_AND_ASSIGN(const auto graph, Capture([&] { return Copy(); }));
  stand_in::LoseDevice(cudaErrorIllegalAddress);
  EXPECT_EQ(graph.Launch(native()), cudaErrorIllegalAddress);
  stand_in::Reset();
}

}  // namespace
}  // namespace ebb
