// How the kernels of a CUDA device fail, on the stand-in. ../optim/kernels_test.cc checks their
// results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <string>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "tests/status.h"

namespace ebb::optim {
namespace {

class KernelsFailureTest : public ::testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { stand_in::Reset(); }
};

struct Memory {
  float source[8] = {1, 2, 3, 4, 5, 6, 7, 8}, destination[8] = {}, first[8] = {}, second[8] = {};
  BFloat16 rounded[8];
  double block = 0, sum = 0;
  UpdateConstants constants = UpdateConstantsOf(OptimizerConfig{}, {.learning_rate = 1});
};

void UseEverything(Kernels& kernels, Stream& stream, Memory& memory) {
  kernels.Cast(stream, memory.source, DType::kFloat32, memory.rounded, DType::kBFloat16, 8,
               Rounding::kNearest);
  kernels.Accumulate(stream,
                     {.source = memory.source, .destination = memory.destination, .count = 8});
  kernels.SumOfSquares(stream, memory.source, DType::kFloat32, 8, {&memory.block, 1}, &memory.sum);
  kernels.AddTo(stream, memory.source, &memory.sum);
  kernels.Update(stream, {},
                 {.master = memory.destination,
                  .gradient = memory.source,
                  .states = {{memory.first}, {memory.second}},
                  .count = 8},
                 &memory.constants);
}

TEST_P(KernelsFailureTest, ALaunchThatFailsFailsTheDeviceAndNothingIsLaunchedAnyMore) {
  const Device device = *Device::Cuda();
  const auto kernels = *Kernels::For(device);
  Stream stream = *device.NewStream("update");
  const Buffer shared = *device.AllocateShared(sizeof(Memory), "test");
  Memory& memory = *::new (shared.data()) Memory;
  UseEverything(*kernels, stream, memory);
  stream.WaitIdle();
  EXPECT_OK(device.status());
  EXPECT_EQ(memory.sum, 204 + 1);

  stand_in::FailCall(GetParam(), cudaErrorInvalidValue);
  UseEverything(*kernels, stream, memory);
  const absl::Status status = device.status();
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kInternal, "launching",
                                        "CUDA device 0 (stand-in)"));
  EXPECT_EQ(stream.status(), status);
  stream.WaitIdle();
  memory.sum = 5;
  UseEverything(*kernels, stream, memory);
  stream.WaitIdle();
  EXPECT_EQ(memory.sum, 5);
}

INSTANTIATE_TEST_SUITE_P(Launches, KernelsFailureTest,
                         ::testing::Values("LaunchCast", "LaunchAccumulate", "LaunchSumSquares",
                                           "LaunchAddTo", "LaunchUpdate"),
                         [](const ::testing::TestParamInfo<const char*>& launch) {
                           return std::string(launch.param);
                         });

TEST(KernelsLoadTest, ADeviceWithoutCodeInTheBuildIsAnError) {
  const Device device = *Device::Cuda();
  stand_in::FailCall("LoadKernels", cudaErrorNoKernelImageForDevice);
  EXPECT_THAT(Kernels::For(device).status(),
              testing::Says("loading the kernels", "CUDA device 0 (stand-in)"));
  EXPECT_OK(device.status());
  EXPECT_OK(Kernels::For(device));
}

}  // namespace
}  // namespace ebb::optim
