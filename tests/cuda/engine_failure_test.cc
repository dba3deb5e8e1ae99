// The errors of an engine on GPUs that fail. On the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <latch>
#include <string>
#include <utility>

#include "engine_creation.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/toy_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::engine_failure_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

class EngineOnFailingGpuTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  using Seen = std::array<absl::Status, kRanks>;

  void TearDown() override { stand_in::Reset(); }

  enum class Second : uint8_t {
    kGoesOn,
    kLeaves,
    kStalls,  // until the first rank has its Status
  };
  // Every rank trains one successful step. Then `fault` happens on rank 0, and all ranks train on.
  // Returns each rank's report.
  Seen TrainWith(const std::function<void()>& fault, Second second = Second::kGoesOn) {
    Seen seen;
    std::latch all_have_trained(kRanks), first_has_failed(1);
    OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ToyModel model(ToyOptions(), device);
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model.spec(), config_));
      ASSERT_OK(model.Train(engine, world.rank(), 0));
      ASSERT_OK(engine.Report().status());
      all_have_trained.arrive_and_wait();
      absl::Status& own = seen[static_cast<size_t>(world.rank())];
      if (world.rank() == 0) fault();
      if (world.rank() == 1 && second == Second::kLeaves) return;
      if (world.rank() == 1 && second == Second::kStalls) first_has_failed.wait();
      for (int step = 1; step < 4 && own.ok(); ++step)
        own = model.Train(engine, world.rank(), step);
      if (world.rank() == 0) first_has_failed.count_down();
      // The error stays.
      EXPECT_FALSE(model.Train(engine, world.rank(), 9).ok());
      EXPECT_FALSE(engine.Report().ok());
    });
    return seen;
  }

  Config config_ = [] {
    Config config;
    config.micro_batch_size = 1;
    config.zero.stage = 3;
    config.ebb.timeout_seconds = 20;
    return config;
  }();
};

TEST_F(EngineOnFailingGpuTest, ALostDeviceFailsTheEngine) {
  for (const absl::Status& status :
       TrainWith([] { stand_in::LoseDevice(cudaErrorIllegalAddress); })) {
    EXPECT_THAT(Text(status), AllOf(HasSubstr("an illegal memory access was encountered"),
                                    HasSubstr("CUDA device 0")));
  }
}

TEST_F(EngineOnFailingGpuTest, AKernelThatDoesNotStartFailsTheEngineOnAllRanks) {
  for (const char* function : {"LaunchUpdate", "LaunchSumSquares", "cudaMemcpyAsync"}) {
    const Seen seen = TrainWith([&] { stand_in::FailCall(function, cudaErrorLaunchFailure); });
    for (const absl::Status& status : seen) EXPECT_FALSE(status.ok()) << function;
    // On either rank that called it.
    EXPECT_THAT(Text(seen[0]) + Text(seen[1]), HasSubstr("an error of the stand-in")) << function;
    stand_in::Reset();
  }
}

TEST_F(EngineOnFailingGpuTest, AnErrorThatNcclNoticesFailsTheStepOfAllRanks) {
  const NcclSharesDevice nccl;
  const Seen seen = TrainWith([] { stand_in::FailCommunicators(1, ncclRemoteError); });
  for (const absl::Status& status : seen)
    EXPECT_THAT(Text(status), HasSubstr("remote process exited"));
}

TEST_F(EngineOnFailingGpuTest, ARankThatHasDestroyedItsEngineIsNotWaitedFor) {
  config_.ebb.timeout_seconds = 600;
  for (const bool nccl : {false, true}) {
    const NcclSharesDevice shares(nccl);
    const Seen seen = TrainWith([] {}, Second::kLeaves);
    EXPECT_THAT(Text(seen[0]), HasSubstr("rank 1 has left"));
  }
}

// Errors of NCCL's operations do not say where the host is.
TEST_F(EngineOnFailingGpuTest, TheFirstWaitForAStalledRankIsReported) {
  config_.zero.param_persistence_threshold = 0;
  config_.ebb.timeout_seconds = 0.5;
  for (const bool nccl : {false, true}) {
    const NcclSharesDevice shares(nccl);
    const Seen seen = TrainWith([] {}, Second::kStalls);
    EXPECT_THAT(Text(seen[0]), AllOf(HasSubstr("has waited 0.5 s for "),
                                     HasSubstr("on communicator 'engine gather'")));
    EXPECT_EQ(Text(seen[0]).find("at the gather of unit '") != std::string::npos, !nccl);
    EXPECT_EQ(Text(seen[0]).find(", at the ") != std::string::npos, !nccl);
    EXPECT_FALSE(seen[1].ok());
  }
}

TEST_F(EngineOnFailingGpuTest, AllRanksReportAFullDevice) {
  int nth = 1;
  for (;; ++nth) {  // for any allocation
    SCOPED_TRACE(nth);
    stand_in::FailCall("cudaMalloc", cudaErrorMemoryAllocation, nth);
    const std::vector<absl::Status> said = CreationOnAll(kRanks, config_);
    if (said[0].ok() && said[1].ok()) break;
    for (const absl::Status& each : said) EXPECT_FALSE(each.ok());
    EXPECT_THAT(Text(said[0]) + Text(said[1]), HasSubstr("out of memory"));
    stand_in::Reset();
  }
  EXPECT_GT(nth, 2 * kRanks);
}

TEST_F(EngineOnFailingGpuTest, TheTrainersStreamIsTheEnginesComputeStream) {
  const Device device = *Device::Cuda();
  const Stream own = *device.NewStream("trainer");
  ASSERT_OK_AND_ASSIGN(const auto engine,
                       Engine::Create(World::Single(), device, ToyModel(ToyOptions()).spec(),
                                      config_, {.compute = own.view()}));
  EXPECT_EQ(engine.compute_stream().native, own.view().native);
}

}  // namespace
}  // namespace ebb::testing::engine_failure_test
