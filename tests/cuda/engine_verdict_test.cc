// Tensor ranks on GPUs: with parameters that are all whole over tensor, two data ranks x two tensor
// ranks have the bits of two ranks on the CPU, over NCCL and on a shared device. On the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"

namespace ebb::testing::engine_verdict_test {
namespace {

using ::testing::Each;

constexpr int kData = 2, kTensor = 2, kSteps = 3;

struct Trained {
  std::vector<uint32_t> masters;
  std::vector<double> norms;  // by step
  absl::Status reported;      // of a step with an error
  friend bool operator==(const Trained&, const Trained&) = default;
};

// A step with the loss of `samples`, whose first layers have the gradients of others.
absl::Status TrainOtherwise(ToyModel& model, Engine& engine, int samples, int64_t number) {
  Step step = engine.BeginStep();
  for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, samples, number);
  model.Backward(step, model.visits() - 1, samples, number);
  for (int v = model.visits() - 1; v-- > 0;) model.Backward(step, v, samples + kData, number);
  return step.Finish();
}

// `odd`: the rank that overflows in the second step, or that has other gradients than its replica.
std::vector<Trained> Train(bool on_gpu, int tensor, int odd, bool overflows) {
  Config config = ConfigFor({.world = kData, .stage = 3});
  config.gradient_clipping = 0.1;
  config.ebb.check_overflow = true;
  config.ebb.deterministic_reduce = true;
  config.ebb.mesh.tensor = tensor;
  std::vector<Trained> all(static_cast<size_t>(kData * tensor));
  ExpectOk(RunThreads(kData * tensor, [&](World world) -> absl::Status {
    absl::StatusOr<Device> device = on_gpu ? Device::Cuda() : Device::Cpu(1);
    EBB_RETURN_IF_ERROR(device.status());
    ToyModel model({}, *device);
    ModelSpec spec = model.spec();
    for (ParameterSpec& parameter : spec.parameters) parameter.over_tensor = OverTensor::kWhole;
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, *device, spec, config));
    Trained& trained = all[static_cast<size_t>(world.rank())];
    for (int step = 0; step < kSteps; ++step) {
      const bool is_odd = step == 1 && world.rank() == odd;
      const int samples = engine.world().rank();
      const absl::Status finished =
          is_odd && !overflows ? TrainOtherwise(model, engine, samples, step)
                               : model.Train(engine, samples, step, {}, /*blow_up=*/is_odd);
      const absl::StatusOr<StepReport> report = engine.Report();
      if (report.ok()) {
        trained.norms.push_back(report->applied ? report->gradient_norm : -1);
      } else {
        trained.reported = finished.ok() ? report.status() : finished;
      }
    }
    EBB_ASSIGN_OR_RETURN(trained.masters, MasterBits(engine, spec));
    return absl::OkStatus();
  }));
  return all;
}

class VerdictOnGpuTest : public ::testing::TestWithParam<bool> {
 protected:
  void TearDown() override { stand_in::Reset(); }
  const NcclSharesDevice nccl_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Connected, VerdictOnGpuTest, ::testing::Bool(), [](const auto& test) {
  return test.param ? "ByNccl" : "ByTheSharedDevice";
});

TEST_P(VerdictOnGpuTest, ReplicasCountOnceAndOneThatOverflowsSkipsTheStepOnAllRanks) {
  const std::vector<Trained> on_cpu = Train(/*on_gpu=*/false, 1, /*odd=*/1, /*overflows=*/true);
  ASSERT_EQ(on_cpu[0].norms.size(), size_t{kSteps});
  ASSERT_EQ(on_cpu[0].norms[1], -1);
  EXPECT_THAT(Train(/*on_gpu=*/true, kTensor, /*odd=*/3, /*overflows=*/true), Each(on_cpu[0]));
}

TEST_P(VerdictOnGpuTest, AReplicaThatDiffersIsAnErrorOnAllRanks) {
  for (const Trained& trained : Train(/*on_gpu=*/true, kTensor, /*odd=*/2, /*overflows=*/false)) {
    EXPECT_THAT(trained.reported, Says(" differs between tensor ranks 0 and 1: "));
    EXPECT_EQ(trained.norms.size(), size_t{kSteps - 1});
  }
}

}  // namespace
}  // namespace ebb::testing::engine_verdict_test
