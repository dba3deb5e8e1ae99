// Units of several dtypes on a GPU have the bits of the CPU, also where one gather by NCCL has all
// dtypes. On the stand-in.
#include <gtest/gtest.h>

#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "state.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::engine_mixed_dtypes_test {
namespace {

constexpr int kRanks = 2, kSteps = 3;

class MixedDTypesOnGpuTest : public ::testing::TestWithParam<Tier> {
 protected:
  void TearDown() override { stand_in::Reset(); }

  Config ConfigOf(int64_t coalesce) const {
    Config config = OnNvme(ConfigFor({.world = kRanks, .stage = 3}), scratch_.path());
    config.compute = DType::kBFloat16;
    config.zero.offload_param.device = config.zero.offload_optimizer.device = GetParam();
    config.ebb.coalesce_bytes = coalesce;
    config.ebb.deterministic_reduce = true;
    return config;
  }
  static absl::StatusOr<std::vector<uint32_t>> TrainOnGpu(const Config& config) {
    std::vector<uint32_t> bits;
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      ToyModel model({.width = 31, .own_dtypes = true}, device);
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), config));
      for (int step = 0; step < kSteps; ++step)
        EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), step));
      EBB_ASSIGN_OR_RETURN(std::vector<uint32_t> masters, MasterBits(engine, model.spec()));
      if (world.rank() == 0) bits = std::move(masters);
      return absl::OkStatus();
    });
    EBB_RETURN_IF_ERROR(status);
    return bits;
  }

  const Scratch scratch_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, MixedDTypesOnGpuTest,
                         ::testing::Values(Tier::kDevice, Tier::kCpu, Tier::kNvme));

TEST_P(MixedDTypesOnGpuTest, HaveTheBitsOfTheCpu) {
  const ToyModel model({.width = 31, .own_dtypes = true});
  for (const bool by_nccl : {false, true}) {
    const NcclSharesDevice nccl(by_nccl);
    for (const int64_t coalesce : {int64_t{0}, int64_t{1} << 30}) {
      const Config config = ConfigOf(coalesce);
      const auto on_cpu = TrainedMasterBits(kRanks, model, config, kSteps);
      const auto on_gpu = TrainOnGpu(config);
      ASSERT_TRUE(on_cpu.ok() && on_gpu.ok()) << on_cpu.status() << on_gpu.status();
      EXPECT_EQ(*on_gpu, *on_cpu);
    }
  }
}

}  // namespace
}  // namespace ebb::testing::engine_mixed_dtypes_test
