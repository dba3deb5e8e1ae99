// Choices and messages of an engine on GPUs when it is created. On the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/create/measurements.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "engine_creation.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/toy_model.h"
#include "tests/full.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::engine_choices_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Warnings of an engine if its streams share queues of the device. On the stand-in.

constexpr char kName[] = "CUDA_DEVICE_MAX_CONNECTIONS";

TEST(DeviceQueuesTest, AWarningNamesStreamsAndQueues) {
  EXPECT_EQ(WarnOfFewQueues(8, nullptr), "");
  EXPECT_EQ(WarnOfFewQueues(15, "32"), "");
  EXPECT_EQ(WarnOfFewQueues(0, "1"), "");
  EXPECT_THAT(WarnOfFewQueues(9, nullptr), AllOf(HasSubstr(kName), HasSubstr("not set"),
                                                 HasSubstr("9 streams"), HasSubstr("8 queues")));
  EXPECT_THAT(WarnOfFewQueues(5, "1"), AllOf(HasSubstr("is 1"), HasSubstr("share 1 queue of")));
  EXPECT_THAT(WarnOfFewQueues(9, "many"), HasSubstr("8 queues"));
}

// Text that engines write to standard error when they are made, once for any number of ranks.
std::string Said(const char* connections, const Config& config) {
  setenv(kName, connections, /*overwrite=*/1);
  ModelSpec model;
  const UnitId unit = model.AddUnit("unit");
  model.Add(unit, {.name = "weight", .shape = {64}, .init = Constant(0)});
  model.forward.push_back({.unit = unit});
  const testing::NcclSharesDevice shares;
  ::testing::internal::CaptureStderr();
  const absl::Status status = RunThreads(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    return Engine::Create(world, device, model, config).status();
  });
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_OK(status);
  setenv(kName, "1000000", /*overwrite=*/1);
  stand_in::Reset();
  return said;
}

TEST(DeviceQueuesTest, AnEngineWarnsOnce) {
  Config config;
  config.micro_batch_size = 1;
  config.zero.stage = 3;
  EXPECT_EQ(Said("32", config).find(kName), std::string::npos);
  const std::string said = Said("7", config);
  EXPECT_THAT(said, HasSubstr("8 streams"));  // five, and three communicators of NCCL's
  EXPECT_EQ(said.find(kName), said.rfind(kName)) << said;
}

// "ebb.coalesce" "auto": measured if NCCL connects the ranks, and then a number that repeats the
// run. On the stand-in.

class EngineCoalesceTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 4;

  void SetUp() override {
    config_.micro_batch_size = 1;
    config_.zero.stage = 3;
    config_.zero.param_persistence_threshold = 0;
    config_.ebb.timeout_seconds = 20;
    config_.ebb.measures_coalesce = true;
  }
  void TearDown() override { stand_in::Reset(); }

  // The configs of the engines that it made, after a step.
  std::vector<Config> Train(const Config& config) {
    std::vector<Config> resolved(kRanks);
    OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ToyModel model(ToyOptions(), device);
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model.spec(), config));
      ASSERT_OK(model.Train(engine, world.rank(), 0));
      ASSERT_OK(engine.Report().status());
      for (const MemoryRow& row : engine.memory()) {
        if (row.state != StateClass::kDriver) {
          EXPECT_EQ(row.predicted_bytes, row.peak_bytes);
        }
      }
      resolved[static_cast<size_t>(world.rank())] = engine.config();
    });
    return resolved;
  }

  Config config_;
};

TEST_F(EngineCoalesceTest, AutoIsOneNumberOfAllRanksThatRepeatsTheRun) {
  const NcclSharesDevice nccl;
  for (const int shard_group : {0, 2}) {
    config_.ebb.shard_group = shard_group;
    const std::vector<Config> first = Train(config_);
    for (const Config& config : first) {
      ASSERT_TRUE(config.ebb.coalesce_bytes.has_value());
      EXPECT_GE(*config.ebb.coalesce_bytes, kBucketBytesMin);
      EXPECT_LE(*config.ebb.coalesce_bytes, kBucketBytesMax);
      EXPECT_FALSE(config.ebb.measures_coalesce);
      EXPECT_EQ(config.ToJson(), first[0].ToJson());
    }
    ASSERT_OK_AND_ASSIGN(const Config again, Config::FromJson(first[0].ToJson()));
    EXPECT_EQ(Train(again)[0].ToJson(), first[0].ToJson());
  }
}

// Like steps, which gather into registered memory.
TEST_F(EngineCoalesceTest, MeasuresOnMemoryThatIsRegistered) {
  const NcclSharesDevice nccl;
  config_.ebb.timeout_seconds = 0.5;
  stand_in::FailCall("ncclCommWindowRegister", ncclSystemError);
  const std::string registering = absl::StrCat("registering ", kBucketBytesMax, " bytes");
  int count = 0;
  for (const absl::Status& each : RefusalsOfAll(kRanks, config_)) {
    const std::string message(each.message());
    EXPECT_THAT(message, AnyOf(HasSubstr(registering), HasSubstr("has waited 0.5 s")));
    count += message.find(registering) != std::string::npos ? 1 : 0;
  }
  EXPECT_GE(count, 1);
}

TEST_F(EngineCoalesceTest, MeasuresWithCopiesWhereARankRegistersNothing) {
  const NcclSharesDevice nccl;
  stand_in::SetRegisters(stand_in::Registers::kBuffers);
  stand_in::FailCall("ncclCommRegister", ncclSystemError);
  EXPECT_TRUE(Train(config_)[0].ebb.coalesce_bytes.has_value());
  EXPECT_EQ(stand_in::Alive().registrations, 0);
}

TEST_F(EngineCoalesceTest, AutoIsNotGivenWithoutNccl) {
  for (const Config& config : Train(config_)) {
    EXPECT_FALSE(config.ebb.coalesce_bytes.has_value());
    EXPECT_FALSE(config.ebb.measures_coalesce);
  }
}

TEST_F(EngineCoalesceTest, AllRanksReportThatThereIsNoRoomForMeasuring) {
  const NcclSharesDevice nccl;
  // The first byte is for each communicator's barriers. Each allocation fails on a rank at least.
  for (int nth = 1; nth <= 24; nth += Full() ? 1 : kRanks - 1) {
    stand_in::FailCall("cudaMalloc", cudaErrorMemoryAllocation, nth);
    SCOPED_TRACE(nth);
    RefusalsOfAll(kRanks, config_);
    stand_in::Reset();
  }
}

}  // namespace
}  // namespace ebb::testing::engine_choices_test
