// Sequences of gpt's ops as CUDA graphs, on the stand-in: when they are captured and launched, for
// how many keys, and the behaviour if that fails. ../gpt/training_test.cc checks that training has
// the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "ebb/runtime/device/device.h"
#include "model/trial_passes.h"
#include "ops/ops.h"
#include "small_ops.h"
#include "stand_in.h"

namespace ebb::gpt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class GptGraphsTest : public ::testing::Test {
 protected:
  GptGraphsTest() { ops_->KeepGraphs(2); }
  void TearDown() override {
    small_.stream.WaitIdle();
    stand_in::Reset();
  }

  // Adds the sums of a's columns to sums_[key]: a product with a kernel of ours after it.
  void Replay(uint64_t key) {
    const std::array<uint64_t, 2> words = {kRows, key};
    ops_->Replay(words, [&, key] {
      ++calls_;
      ops_->Matmul({.a = memory_->a,
                    .a_transposed = true,
                    .b = memory_->b,
                    .c = {memory_->product},
                    .a_sums = {.data = memory_->sums[key], .beta = 1},
                    .m = kWidth,
                    .n = kWidth,
                    .k = kRows});
    });
  }
  float Sum(uint64_t key) {
    small_.stream.WaitIdle();
    return memory_->sums[key][0];
  }
  // How often so many replays make the calls.
  int CallsOf(uint64_t key, int replays) {
    const int before = calls_;
    for (int i = 0; i < replays; ++i) Replay(key);
    return calls_ - before;
  }

  struct Memory {
    float a[kRows * kWidth] = {0.5f}, b[kRows * kWidth] = {}, product[kWidth * kWidth] = {};
    float sums[3][kWidth] = {};
  };
  SmallOpsOn<Memory> small_;
  Memory* const memory_ = small_.memory;
  Ops* const ops_ = small_.ops.get();
  int calls_ = 0;
};

TEST_F(GptGraphsTest, TheSecondTimeIsCapturedAndLaterOnesOnlyLaunched) {
  const int64_t before = small_.device.driver_bytes();
  EXPECT_GE(before, stand_in::kContextBytes + stand_in::kHandleBytes);
  for (int i = 1; i <= 5; ++i) {
    Replay(0);
    EXPECT_EQ(calls_, std::min(i, 2));
    EXPECT_EQ(Sum(0), 0.5f * static_cast<float>(i));
    EXPECT_EQ(ops_->graphs().launches, i - 1);
  }
  EXPECT_EQ(stand_in::GraphLaunches(), 4);
  EXPECT_EQ(ops_->graphs().kept, 1);
  EXPECT_EQ(small_.device.driver_bytes(), before + stand_in::kGraphBytes);
}

TEST_F(GptGraphsTest, EachKeyHasAGraphAndKeysWithoutAPlaceAreLaunchedOneByOne) {
  for (int i = 0; i < 3; ++i)
    for (uint64_t key : {0, 1, 2}) Replay(key);
  EXPECT_EQ(calls_, 2 + 2 + 3);
  EXPECT_EQ(ops_->graphs().kept, 2);
  EXPECT_EQ(ops_->graphs().launches, 4);
  for (uint64_t key : {0, 1, 2}) EXPECT_EQ(Sum(key), 1.5f) << key;
  EXPECT_EQ(stand_in::Alive().graphs, 2);
}

TEST_F(GptGraphsTest, WithoutPlacesNothingIsCaptured) {
  ops_->KeepGraphs(0);
  EXPECT_EQ(CallsOf(0, 3), 3);
  EXPECT_EQ(stand_in::GraphLaunches(), 0);
  EXPECT_EQ(Sum(0), 1.5f);
}

TEST_F(GptGraphsTest, AFailureToCaptureIsLoggedOnceAndLaunchesGoOnOneByOne) {
  for (const char* function : {"cudaStreamBeginCapture", "cudaStreamEndCapture",
                               "cudaGraphInstantiate", "cudaGraphUpload"}) {
    ops_->KeepGraphs(2);
    memory_->sums[0][0] = memory_->sums[1][0] = 0;
    stand_in::FailCall(function, cudaErrorMemoryAllocation);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(CallsOf(0, 1), 1);
    CallsOf(0, 3);
    EXPECT_EQ(CallsOf(1, 3), 3) << "another capture after one has failed";
    const std::string logged = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(logged, AllOf(HasSubstr("no CUDA graphs on CUDA device 0 (stand-in)"),
                              HasSubstr("out of memory")));
    EXPECT_EQ(logged.find("no CUDA graphs"), logged.rfind("no CUDA graphs"));
    EXPECT_EQ(Sum(0), 2) << function;
    EXPECT_EQ(Sum(1), 1.5f) << function;
    EXPECT_TRUE(ops_->status().ok()) << ops_->status();
    EXPECT_EQ(ops_->graphs().kept, 0);
    EXPECT_THAT(ops_->graphs().given_up, HasSubstr("out of memory"));
    EXPECT_EQ(stand_in::Alive().graphs, 0);
  }
}

TEST_F(GptGraphsTest, APassThatCannotBeCapturedIsLaunchedWithoutAGraph) {
  Replay(0);
  stand_in::FailCall("ColumnSumsKernel", cudaErrorStreamCaptureUnsupported);
  Replay(0);
  Replay(0);
  EXPECT_EQ(Sum(0), 1.5f);
  EXPECT_TRUE(ops_->status().ok()) << ops_->status();
  EXPECT_THAT(ops_->graphs().given_up, HasSubstr("sums of columns"));
}

TEST_F(GptGraphsTest, GraphsFromBeforeAFailureAreLaunchedOn) {
  EXPECT_EQ(CallsOf(0, 3), 2);
  stand_in::FailCall("cudaStreamBeginCapture", cudaErrorMemoryAllocation);
  EXPECT_EQ(CallsOf(1, 3), 3);
  EXPECT_EQ(CallsOf(0, 2), 0);
  EXPECT_EQ(Sum(0), 2.5f);
  EXPECT_EQ(Sum(1), 1.5f);
}

TEST_F(GptGraphsTest, ALaunchThatFailsIsTheErrorOfTheOps) {
  CallsOf(0, 2);
  stand_in::FailCall("cudaGraphLaunch", cudaErrorIllegalAddress);
  Replay(0);
  const absl::Status status = ops_->status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("launching a graph on CUDA device 0"), HasSubstr("illegal memory")));
  Replay(0);
  EXPECT_EQ(Sum(0), 1);
  EXPECT_EQ(ops_->status(), status);
}

TEST_F(GptGraphsTest, AFaultOfTheDeviceUnderCaptureIsTheErrorOfTheOps) {
  Replay(0);
  small_.stream.WaitIdle();
  stand_in::LoseDevice(cudaErrorIllegalAddress);
  Replay(0);
  EXPECT_EQ(ops_->status().code(), absl::StatusCode::kInternal);
}

TEST(LaunchTimesTest, GraphsPayWhereLaunchingTakesMoreThanHalfOfRunning) {
  EXPECT_TRUE((LaunchTimes{.host_seconds = 51e-6, .device_seconds = 100e-6}.GraphsPay()));
  EXPECT_FALSE((LaunchTimes{.host_seconds = 49e-6, .device_seconds = 100e-6}.GraphsPay()));
  EXPECT_EQ((LaunchTimes{.host_seconds = 49e-6, .device_seconds = 100e-6}.Text()),
            "a block takes 49 us to launch and 100 us to run");
}

class MeasuredLaunchesTest : public ::testing::TestWithParam<DType> {
 protected:
  MeasuredLaunchesTest() : gpt_(Declare({.shape = shape_}, spec_)) {}
  void TearDown() override { stand_in::Reset(); }
  auto Measure() { return MeasureLaunches(device_, gpt_, options_, DType::kFloat32, *layers_); }

  const GptShape shape_ = {.layers = 2, .heads = 1, .width = 16, .context = 4, .vocabulary = 256};
  ModelSpec spec_;
  const Gpt gpt_;
  const Device device_ = *Device::Cuda();
  const Layers::Options options_ = {.compute = GetParam()};
  const Buffer workspace_ =
      *device_.Allocate(Layers::WorkspaceBytes(device_, shape_, options_), "workspace");
  const std::unique_ptr<Layers> layers_ =
      *Layers::Create(device_, gpt_, options_, workspace_.span());
};

TEST_P(MeasuredLaunchesTest, LeaveNothingBehind) {
  const stand_in::Live before = stand_in::Alive();
  const auto times = Measure();
  ASSERT_TRUE(times.ok()) << times.status();
  EXPECT_GT(times->host_seconds, 0);
  EXPECT_GT(times->device_seconds, 0);
  EXPECT_GT(stand_in::GraphLaunches(), 0);
  EXPECT_EQ(layers_->graphs().most, 0);
  stand_in::Live after = stand_in::Alive();
  EXPECT_GT(after.products, before.products);  // the first step then uses them
  after.products = before.products;
  EXPECT_EQ(after, before);
}

TEST_P(MeasuredLaunchesTest, SayWhyThereAreNoGraphs) {
  stand_in::FailCall("cudaStreamBeginCapture", cudaErrorStreamCaptureUnsupported);
  const auto times = Measure();
  EXPECT_TRUE(absl::IsUnavailable(times.status())) << times.status();
  EXPECT_TRUE(layers_->status().ok());
  stand_in::FailCall("cudaMalloc", cudaErrorMemoryAllocation);
  const absl::Status status = Measure().status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("measuring launches"));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MeasuredLaunchesTest,
                         ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& made) { return std::string(Name(made.param)); });

}  // namespace
}  // namespace ebb::gpt
