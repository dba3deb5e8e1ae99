// Threads that share a GPU, if CUDA fails for one of them: every rank gets a Status that says so,
// nothing hangs and no memory stays allocated. ../comm/failure_test.cc has failures of ranks. On
// the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <latch>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb {
namespace {

using ::testing::AllOf;

using ::testing::HasSubstr;

constexpr int kRanks = 3;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

class SharedDeviceFailureTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(stand_in::Alive(), stand_in::Live{}) << "something was not given back";
    stand_in::Reset();
  }

  struct Seen {
    absl::Status device, communicator;
  };
  // Every rank sums over and over until its communicator has failed; rank 0 calls `fail` meanwhile.
  // Memory is freed as soon as its operation has ended, which the others may still want to read.
  // `waits_work`: if false, no rank can tell when that is, and the memory stays.
  template <class Fail>
  std::array<Seen, kRanks> SumUntilFailed(Fail fail, bool waits_work = true) {
    std::array<std::vector<Buffer>, kRanks> kept;
    std::array<Seen, kRanks> seen;
    std::latch all_have_memory(kRanks);
    testing::OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ASSERT_OK_AND_ASSIGN(const World gpus, world.On(device));
      ASSERT_OK_AND_ASSIGN(Communicator communicator, gpus.NewCommunicator());
      ASSERT_OK_AND_ASSIGN(Stream stream, device.NewStream("sum"));
      for (int round = 0; communicator.status().ok(); ++round) {
        auto& memory = kept[static_cast<size_t>(world.rank())];
        ASSERT_OK_AND_ASSIGN(Buffer values, device.AllocateShared(16000, "test"));
        const CollectiveSpan span = {
            .send = values.data(), .receive = values.data(), .count = 4000};
        memory.push_back(std::move(values));
        if (round == 2) {
          all_have_memory.arrive_and_wait();  // which a lost device does not give
          if (world.rank() == 0) fail();
        }
        ASSERT_OK(communicator.AllReduce(stream, {&span, 1}, DType::kFloat32));
        stream.WaitIdle();
        if (waits_work) memory.clear();
      }
      seen[static_cast<size_t>(world.rank())] = {device.status(), communicator.status()};
    });
    return seen;
  }
};

TEST_F(SharedDeviceFailureTest, AKernelThatCannotBeLaunchedFailsOnlyTheCommunicator) {
  for (const int nth : {1, 2, 3}) {
    const auto seen =
        SumUntilFailed([&] { stand_in::FailCall("cudaLaunchKernel", cudaErrorInvalidValue, nth); });
    for (const Seen& rank : seen) {
      EXPECT_OK(rank.device);
      EXPECT_EQ(rank.communicator, seen[0].communicator);
      EXPECT_EQ(rank.communicator.code(), absl::StatusCode::kInternal);
      EXPECT_THAT(Message(rank.communicator),
                  AllOf(HasSubstr("failed: launching a reduction's kernel"), HasSubstr("rank "),
                        HasSubstr("CUDA device 0")));
    }
  }
}

TEST_F(SharedDeviceFailureTest, AFailureOfAnyCallIsAnErrorOnAllRanks) {
  for (const std::string function :
       {"cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaStreamSynchronize"}) {
    for (const int nth : {1, 2, 3, 5, 8}) {
      SCOPED_TRACE(function + " " + std::to_string(nth));
      const auto seen =
          SumUntilFailed([&] { stand_in::FailCall(function, cudaErrorIllegalAddress, nth); },
                         function != "cudaStreamSynchronize");
      for (const Seen& rank : seen) {
        EXPECT_EQ(rank.communicator, seen[0].communicator);
        EXPECT_THAT(Message(rank.communicator), AllOf(HasSubstr("rank "), HasSubstr(function)));
      }
    }
  }
}

TEST_F(SharedDeviceFailureTest, LostDeviceFailsAllRanks) {
  const auto seen = SumUntilFailed([] { stand_in::LoseDevice(cudaErrorIllegalAddress); }, false);
  for (const Seen& rank : seen)
    EXPECT_THAT(Message(rank.communicator),
                AllOf(HasSubstr("rank "), HasSubstr("illegal memory access")));
}

// One rank cannot make its communicator.
class SharedDeviceCreationTest : public SharedDeviceFailureTest {
 protected:
  std::array<absl::Status, kRanks> MakeUntilFailed() {
    std::array<absl::Status, kRanks> seen;
    testing::OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ASSERT_OK_AND_ASSIGN(const World gpus, world.On(device));
      absl::StatusOr<Communicator> communicator = gpus.NewCommunicator();
      absl::Status& mine = seen[static_cast<size_t>(world.rank())];
      mine = communicator.status();
      if (!communicator.ok()) return;
      Stream stream = device.CallerStream();
      ASSERT_OK(communicator->Barrier(stream));
      stream.WaitIdle();
      mine = communicator->status();
    });
    return seen;
  }
};

TEST_F(SharedDeviceCreationTest, RankWithoutEventsFailsTheCommunicatorOfAll) {
  stand_in::FailCall("cudaEventCreateWithFlags", cudaErrorInvalidValue, 4);
  for (const absl::Status& rank : MakeUntilFailed())
    EXPECT_THAT(Message(rank), HasSubstr("creating an event"));
}

TEST_F(SharedDeviceCreationTest, DeviceThatTheBuildHasNoCodeForFailsTheCommunicatorOfAll) {
  stand_in::FailCall("LoadReductions", cudaErrorNoKernelImageForDevice, 2);
  for (const absl::Status& rank : MakeUntilFailed())
    EXPECT_THAT(Message(rank), AllOf(HasSubstr("loading the kernels of reductions"),
                                     HasSubstr("CUDA device 0 (stand-in)")));
}

TEST_F(SharedDeviceFailureTest, StreamOfTheCpuIsRefused) {
  const World world = *World::Single().On(*Device::Cuda());
  Communicator communicator = *world.NewCommunicator();
  Stream stream = Device::Cpu(1).CallerStream();
  const absl::Status status = communicator.Barrier(stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("a stream of CUDA device 0"));
}

TEST_F(SharedDeviceFailureTest, CommunicatorOfTheCpuAndOneOfTheDeviceAreDifferent) {
  std::array<absl::Status, 2> seen;
  testing::OnThreads(2, [&](World world) {
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ASSERT_OK_AND_ASSIGN(const World gpus, world.On(device));
    const World& one_of_them = world.rank() == 0 ? world : gpus;
    seen[static_cast<size_t>(world.rank())] = one_of_them.NewCommunicator().status();
  });
  for (const absl::Status& rank : seen)
    EXPECT_THAT(Message(rank),
                AllOf(HasSubstr("different communicators"), HasSubstr("on CUDA device 0")));
}

}  // namespace
}  // namespace ebb
