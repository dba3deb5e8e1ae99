// The stand-in ends the program if a call may wait inside CUDA's driver for another rank, because
// the driver may then block that rank's thread.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>

#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "state.h"

namespace ebb::driver_waits_test {
namespace {

class DriverWaitsDeathTest : public ::testing::Test {
 protected:
  DriverWaitsDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  ~DriverWaitsDeathTest() override { stand_in::Reset(); }

  static void NoteCollective(Stream& stream) {
    stand_in::NoteCollective(static_cast<cudaStream_t>(stream.view().native));
  }
  void CopyOut(Stream& stream, std::byte* to) { stream.Copy(to, memory_.data(), 64); }

  Device device_ = *Device::Cuda();
  Buffer memory_ = *device_.Allocate(64, "test"), locked_ = *device_.AllocateShared(64, "test");
  std::array<std::byte, 64> pageable_ = {};
  Stream first_ = *device_.NewStream("first"), second_ = *device_.NewStream("second");
  Event event_ = *device_.NewEvent();
};

constexpr char kCopyWaits[] = "a copy of pageable memory waits inside the driver";

TEST_F(DriverWaitsDeathTest, ACopyOfPageableMemoryBehindACollective) {
  NoteCollective(first_);
  CopyOut(first_, locked_.data());
  CopyOut(second_, pageable_.data());
  EXPECT_DEATH(CopyOut(first_, pageable_.data()), kCopyWaits);
  EXPECT_DEATH(first_.Copy(memory_.data(), pageable_.data(), 64), kCopyWaits);
  first_.WaitIdle();
  CopyOut(first_, pageable_.data());
}

TEST_F(DriverWaitsDeathTest, ACopyOfPageableMemoryBehindTheEventOfACollective) {
  NoteCollective(first_);
  first_.Record(event_);
  second_.Wait(event_);
  EXPECT_DEATH(CopyOut(second_, pageable_.data()), kCopyWaits);
  second_.WaitIdle();
  CopyOut(second_, pageable_.data());
  event_.Wait();
  CopyOut(first_, pageable_.data());
  second_.Wait(event_);
  CopyOut(second_, pageable_.data());
}

TEST_F(DriverWaitsDeathTest, ALaunchThatFindsItsQueueFullBehindACollective) {
  const auto launch = [&] { first_.Zero(memory_.data(), 64); };
  stand_in::SetLaunchQueue(3);
  stand_in::HoldUntilHostWaits(static_cast<cudaStream_t>(first_.view().native));
  NoteCollective(first_);
  launch();
  launch();
  EXPECT_DEATH(launch(), "a launch waits inside the driver for room behind a collective");
  first_.WaitIdle();
  for (int i = 0; i < 10; ++i) launch();
}

}  // namespace
}  // namespace ebb::driver_waits_test
