// What an engine logs if its streams share queues of the device. On the stand-in.
#include "ebb/runtime/engine/device_queues.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/engine.h"
#include "nccl_shares_device.h"
#include "stand_in.h"

namespace ebb::device_queues_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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

// What engines write to standard error when they are made, once for any number of ranks.
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
  EXPECT_TRUE(status.ok()) << status;
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

}  // namespace
}  // namespace ebb::device_queues_test
