// The stand-in finds errors that a device shows only by chance: memory touched by two streams, one
// of them writing, without an event or a wait between them.
#include "order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "state.h"

namespace ebb::order_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OrderTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { stand_in::WatchOrder(); }
  void TearDown() override { stand_in::Reset(); }

  void CopyIn(Stream& stream, int64_t at = 0) {
    stream.Copy(memory_.data() + at, host_.data(), 64);
  }
  void CopyOut(Stream& stream, int64_t at = 0) {
    stream.Copy(host_.data() + 64, memory_.data() + at, 64);
  }

  // So that the test itself has no race: waits in a way that the order check does not see.
  static void AwaitUnseen(Stream& stream) {
    std::thread([&] { stream.WaitIdle(); }).join();
  }

  Device device_ = *Device::Cuda();
  Buffer memory_ = *device_.Allocate(256, "test");
  Buffer host_ = *device_.AllocateShared(256, "test");
  // Destroyed first: work enqueued on them ends before the memory is freed.
  Stream first_ = *device_.NewStream("first"), second_ = *device_.NewStream("second");
  Event event_ = *device_.NewEvent();
};

TEST_F(OrderTest, AMissingEventIsFound) {
  CopyIn(first_);
  AwaitUnseen(first_);
  CopyOut(second_, /*at=*/32);
  EXPECT_THAT(stand_in::TakeRaces(), ElementsAre(AllOf(HasSubstr("reads bytes 32 to 96"),
                                                       HasSubstr("writes bytes 0 to 64"))));
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

TEST_F(OrderTest, WritingMemoryThatAnotherStreamStillReadsIsFound) {
  CopyOut(first_);
  AwaitUnseen(first_);
  second_.Zero(memory_.data(), 8);
  EXPECT_EQ(stand_in::TakeRaces().size(), 1u);
}

TEST_F(OrderTest, AnEventBeforeTheAccessDoesNotOrderIt) {
  first_.Record(event_);
  CopyIn(first_);
  AwaitUnseen(first_);
  second_.Wait(event_);
  CopyOut(second_);
  EXPECT_EQ(stand_in::TakeRaces().size(), 1u);
}

TEST_F(OrderTest, EventsHostWaitsAndOtherBytesAreInOrder) {
  CopyIn(first_);
  CopyOut(first_, /*at=*/128);
  first_.Record(event_);
  second_.Wait(event_);
  CopyOut(second_);
  CopyIn(second_, /*at=*/128);
  second_.WaitIdle();
  CopyIn(first_);
  first_.Record(event_);
  event_.Wait();
  CopyIn(second_);
  CopyOut(first_, /*at=*/192);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

// An update's constants are in device memory, to which the verdict is copied.
TEST_F(OrderTest, AnUpdateBesideTheCopyOfItsConstantsIsFound) {
  const auto kernels = *optim::Kernels::For(device_);
  const auto* const constants = reinterpret_cast<const optim::UpdateConstants*>(memory_.data());
  auto* const numbers = reinterpret_cast<float*>(memory_.data() + 192);
  const optim::UpdateArrays arrays = {.master = numbers,
                                      .gradient = numbers + 4,
                                      .states = {{numbers + 8}, {numbers + 12}},
                                      .count = 4};
  for (const bool waits : {false, true}) {
    first_.Copy(memory_.data(), host_.data(), sizeof(*constants));
    first_.Record(event_);
    AwaitUnseen(first_);
    if (waits) second_.Wait(event_);
    kernels->Update(second_, OptimizerConfig(), arrays, constants);
    EXPECT_EQ(stand_in::TakeRaces().empty(), waits);
    second_.WaitIdle();
  }
}

TEST_F(OrderTest, OrderPassesThroughAThirdStream) {
  Stream third = *device_.NewStream("third");
  CopyIn(first_);
  first_.Record(event_);
  second_.Wait(event_);
  second_.Record(event_);
  third.Wait(event_);
  CopyOut(third);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

TEST_F(OrderTest, AWaitOfAnotherThreadOrdersNothingHere) {
  CopyIn(first_);
  AwaitUnseen(first_);
  CopyOut(second_);
  EXPECT_EQ(stand_in::TakeRaces().size(), 1u);
}

TEST_F(OrderTest, OrderPassesThroughTheWaitsOfHostStreams) {
  Stream host = *device_.NewHostStream("host"), beside = *device_.NewHostStream("beside");
  CopyIn(first_);
  first_.Record(event_);
  host.Wait(event_);
  host.Record(event_);
  beside.Wait(event_);
  beside.Record(event_);
  second_.Wait(event_);
  CopyOut(second_);
  second_.Record(event_);
  host.Wait(event_);
  host.Record(event_);
  event_.Wait();
  CopyIn(first_);
  first_.Record(event_);
  beside.Wait(event_);
  beside.WaitIdle();
  CopyOut(second_);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

TEST_F(OrderTest, OnlyTheWaitsOfHostStreamsPassOnOrder) {
  Stream host = *device_.NewHostStream("host"), beside = *device_.NewHostStream("beside");
  CopyIn(first_);
  first_.Record(event_);
  host.Wait(event_);
  beside.Record(event_);
  second_.Wait(event_);
  AwaitUnseen(first_);
  CopyOut(second_);
  EXPECT_EQ(stand_in::TakeRaces().size(), 1u);
}

TEST_F(OrderTest, AHostStreamsWriteWithoutAnEventIsFound) {
  Stream host = *device_.NewHostStream("host");
  host.Zero(host_.data(), 64);
  AwaitUnseen(host);
  CopyIn(first_);
  EXPECT_THAT(stand_in::TakeRaces(),
              ElementsAre(AllOf(HasSubstr("cudaMemcpyAsync"), HasSubstr("reads bytes 0 to 64"),
                                HasSubstr("zeroing by the host"))));
}

TEST_F(OrderTest, AHostStreamThatDoesNotWaitForACopyIsFound) {
  Stream host = *device_.NewHostStream("host");
  CopyOut(first_);
  AwaitUnseen(first_);
  host.Copy(host_.data() + 128, host_.data() + 64, 64);
  AwaitUnseen(host);
  EXPECT_THAT(stand_in::TakeRaces(),
              ElementsAre(AllOf(HasSubstr("a copy by the host"), HasSubstr("reads bytes 64 to 128"),
                                HasSubstr("cudaMemcpyAsync"))));
}

TEST_F(OrderTest, EventsOrderHostStreamsWithTheDevice) {
  Stream host = *device_.NewHostStream("host");
  host.Zero(host_.data(), 64);
  host.Record(event_);
  first_.Wait(event_);
  CopyIn(first_);
  CopyOut(first_);
  first_.Record(event_);
  host.Wait(event_);
  host.Copy(host_.data(), host_.data() + 64, 64);
  host.WaitIdle();
  CopyIn(second_);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

TEST_F(OrderTest, AnEarlierRecordOfAHostStreamDoesNotOrderALaterTask) {
  Stream host = *device_.NewHostStream("host");
  Event later = *device_.NewEvent();
  host.Record(event_);
  host.Zero(host_.data(), 64);
  host.Record(later);
  first_.Wait(event_);
  AwaitUnseen(host);
  CopyIn(first_);
  EXPECT_EQ(stand_in::TakeRaces().size(), 1u);
  second_.Wait(later);
  CopyIn(second_, /*at=*/64);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

TEST_F(OrderTest, TheCallingThreadsAccessesComeAfterItsWaitsAndBeforeItsEnqueuedWork) {
  const stand_in::Touched touched[] = {stand_in::Writes(host_.data() + 64, 64)};
  CopyOut(first_);
  AwaitUnseen(first_);
  stand_in::NoteHostTouch("the test", touched);
  EXPECT_THAT(stand_in::TakeRaces(), ElementsAre(HasSubstr("the test")));
  first_.WaitIdle();
  stand_in::NoteHostTouch("the test", touched);
  CopyOut(second_);
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
  std::thread([&] { stand_in::NoteHostTouch("another thread", touched); }).join();
  EXPECT_THAT(stand_in::TakeRaces(), ElementsAre(HasSubstr("another thread")));
}

// The stand-in ends the program if a call may wait inside CUDA's driver for another rank, because
// the driver may then block that rank's thread.

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
}  // namespace ebb::order_test
