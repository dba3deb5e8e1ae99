// "zero_optimization.offload_optimizer.ratio" "auto" on GPUs: measured, at least as large as memory
// demands, and then a number that repeats the run. On the stand-in, where rates mean nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/offload_ratio.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::engine_offload_ratio_test {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 2, kSteps = 3;

struct Outcome {
  Config config;
  std::vector<uint32_t> bits;
};

// Over NCCL, and as threads that share a device.
class EngineOffloadRatioTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    config_.micro_batch_size = 1;
    config_.compute = DType::kBFloat16;
    config_.zero.stage = 2;
    config_.zero.sub_group_size = 2048;
    config_.zero.offload_optimizer = {.device = Tier::kCpu, .pin_memory = false};
    config_.ebb.timeout_seconds = 3600;  // so that a rank that waits for another would show
  }
  void TearDown() override { stand_in::Reset(); }

  static ToyModel ModelOn(const Device& device) { return ToyModel({.width = 67}, device); }
  static int64_t BytesOf(const Config& config) {
    return DeviceBytes(ModelOn(Device::Cpu(1)).spec(), kRanks, config);
  }

  // All ranks on one device, or each on a device of its own.
  static Outcome Train(const Config& config, bool own_devices = false) {
    std::vector<Outcome> outcomes(kRanks);
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda(own_devices ? world.rank() : 0));
      ToyModel model = ModelOn(device);
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), config));
      for (int step = 0; step < kSteps; ++step)
        EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), step));
      Outcome& outcome = outcomes[static_cast<size_t>(world.rank())];
      EBB_ASSIGN_OR_RETURN(outcome.bits, MasterBits(engine, model.spec()));
      for (const MemoryRow& row : engine.memory()) {
        if (row.state != StateClass::kDriver) {
          EXPECT_EQ(row.predicted_bytes, row.peak_bytes);
        }
      }
      outcome.config = engine.config();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(outcomes[0].config.ToJson(), outcomes[1].config.ToJson());
    EXPECT_FALSE(outcomes[0].config.zero.offload_optimizer.measures_ratio);
    return outcomes[0];
  }

  const NcclSharesDevice nccl_{GetParam()};
  Config config_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, EngineOffloadRatioTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Nccl" : "Threads"; });

TEST_P(EngineOffloadRatioTest, AutoIsOneNumberOfAllRanksWithTheBitsOfEveryOther) {
  const Outcome measured = Train(WithAutoRatio(config_));
  const double ratio = measured.config.zero.offload_optimizer.ratio;
  EXPECT_GE(ratio, 0);
  EXPECT_LE(ratio, 1);
  const absl::StatusOr<Config> again = Config::FromJson(measured.config.ToJson());
  ASSERT_TRUE(again.ok()) << again.status();
  const Outcome repeated = Train(*again);
  EXPECT_EQ(repeated.config.ToJson(), measured.config.ToJson());
  EXPECT_FALSE(measured.bits.empty());
  EXPECT_EQ(repeated.bits, measured.bits);
  for (const double other : {0.0, 1.0})
    EXPECT_EQ(Train(WithRatio(config_, other)).bits, measured.bits);
}

TEST_P(EngineOffloadRatioTest, DeviceMemoryRaisesIt) {
  const int64_t of_half = BytesOf(WithRatio(config_, 0.5)), cap = BytesOf(WithRatio(config_, 0.9));
  ASSERT_GT(of_half, cap);
  config_.ebb.device_memory = cap;
  const Outcome outcome = Train(WithAutoRatio(config_));
  EXPECT_GT(outcome.config.zero.offload_optimizer.ratio, 0.5);
  EXPECT_LE(BytesOf(outcome.config), cap);
}

TEST_P(EngineOffloadRatioTest, WithoutACapFreeMemoryRaisesIt) {
  const int64_t bytes = BytesOf(WithRatio(config_, 0.9));
  for (const bool own_devices : {false, true}) {
    // A tenth is left to other processes.
    stand_in::SetFreeMemory(static_cast<size_t>(bytes / 9 * 10 + 20) * (own_devices ? 1 : kRanks));
    const Outcome outcome = Train(WithAutoRatio(config_), own_devices);
    EXPECT_GT(outcome.config.zero.offload_optimizer.ratio, 0.5);
    EXPECT_LE(BytesOf(outcome.config), bytes + 20);
  }
}

TEST_P(EngineOffloadRatioTest, AModelThatFitsNowhereIsRefused) {
  config_.ebb.device_memory = BytesOf(WithRatio(config_, 1)) - 1;
  const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    const absl::Status created =
        Engine::Create(world, device, ModelOn(device).spec(), WithAutoRatio(config_)).status();
    EXPECT_THAT(std::string(created.message()), HasSubstr("ebb.device_memory is "));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// At any place in Create: no rank goes on alone, and none waits for another.
TEST_P(EngineOffloadRatioTest, AllRanksReportAFailureWhileMeasuring) {
  for (const char* call : {"cudaMalloc", "cudaHostAlloc"}) {
    bool failed = true;
    for (int nth = 1; failed; ++nth) {
      stand_in::FailCall(call, cudaErrorMemoryAllocation, nth);
      std::vector<absl::Status> seen(kRanks);
      const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
        seen[static_cast<size_t>(world.rank())] =
            Engine::Create(world, device, ModelOn(Device::Cpu(1)).spec(), WithAutoRatio(config_))
                .status();
        return absl::OkStatus();
      });
      stand_in::Reset();
      failed = !status.ok() || !seen[0].ok();
      EXPECT_EQ(seen[0].ok(), seen[1].ok()) << call << " " << nth;
      EXPECT_TRUE(nth > 2 || failed) << call;
    }
  }
}

}  // namespace
}  // namespace ebb::testing::engine_offload_ratio_test
