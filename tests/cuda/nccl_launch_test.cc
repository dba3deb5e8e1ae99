// An NCCL operation's cost for the thread that enqueues it. The thread must wait until NCCL has
// launched it, which takes microseconds; a sleep takes many times that. On the stand-in.
#include <gtest/gtest.h>
#include <time.h>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "tests/status.h"
#include "thread_ranks.h"

namespace {

thread_local int sleeps = 0;

}  // namespace

// Replaces the C library's function in the whole program.
extern "C" int nanosleep(const timespec* time, timespec* left) {
  ++sleeps;
  return clock_nanosleep(CLOCK_MONOTONIC, 0, time, left) == 0 ? 0 : -1;
}

namespace ebb::nccl_launch_test {
namespace {

// For each of a few operations that are ready at the `looks`th look.
absl::Status Launch(int looks, int* slept) {
  const absl::Status status = testing::RunOnGpu(1, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
    stand_in::DelayLaunches(looks);
    const int before = sleeps;
    for (int i = 0; i < 5; ++i) EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    *slept = sleeps - before;
    stream.WaitIdle();
    return communicator.status();
  });
  stand_in::Reset();
  return status;
}

TEST(NcclLaunchTest, AShortWaitDoesNotSleep) {
  int slept = -1;
  EXPECT_OK(Launch(/*looks=*/100, &slept));
  EXPECT_EQ(slept, 0);
}

TEST(NcclLaunchTest, ALongWaitKeepsNoCoreBusy) {
  int slept = -1;
  EXPECT_OK(Launch(/*looks=*/450, &slept));
  EXPECT_GT(slept, 0);
}

}  // namespace
}  // namespace ebb::nccl_launch_test
