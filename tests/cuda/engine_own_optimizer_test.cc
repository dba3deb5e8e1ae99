// A trainer's own optimizer on a GPU. It is called with memory of the tier where the update runs,
// for applied steps only, and gives the bits of the CPU; and its errors. On the stand-in, where its
// kernel is enqueued as one of CUDA's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "order.h"
#include "stand_in.h"
#include "state.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::engine_own_optimizer_test {
namespace {

constexpr int kRanks = 2, kSteps = 5, kOverflow = 2;

// How often it was called, by the number of the applied update, with a stream and without.
class Calls {
 public:
  void Note(const UpdateSlice& update) {
    const std::lock_guard lock(mutex_);
    ++(update.stream.native == nullptr ? without_ : with_)[update.step];
  }
  std::map<int64_t, int> with_stream() const { return with_; }
  std::map<int64_t, int> without_stream() const { return without_; }

 private:
  std::mutex mutex_;
  std::map<int64_t, int> with_, without_;
};

struct AdamArrays {
  float* master;
  const float* gradient;
  std::array<float*, 2> states;
  int64_t count, step;
  float rate;
};

void RunAdam(const AdamArrays& arrays) {
  for (int64_t i = 0; i < arrays.count; ++i) {
    const float g = arrays.gradient[i];
    float &m = arrays.states[0][i], &v = arrays.states[1][i];
    m = 0.9f * m + 0.1f * g;
    v = 0.999f * v + 0.001f * g * g;
    const float step = static_cast<float>(arrays.step);
    const float correction1 = 1 - std::pow(0.9f, step), correction2 = 1 - std::pow(0.999f, step);
    arrays.master[i] -= arrays.rate * (m / correction1) / (std::sqrt(v / correction2) + 1e-8f);
  }
}

OptimizerSpec Adam(Calls& calls) {
  return {.states = {"exp_avg", "exp_avg_sq"}, .update = [&calls](const UpdateSlice& update) {
            calls.Note(update);
            const AdamArrays arrays = {.master = update.master.data(),
                                       .gradient = update.gradient.data(),
                                       .states = {update.states[0].data(), update.states[1].data()},
                                       .count = static_cast<int64_t>(update.master.size()),
                                       .step = update.step,
                                       .rate = static_cast<float>(update.learning_rate)};
            if (update.stream.native == nullptr) {
              RunAdam(arrays);
              return absl::OkStatus();
            }
            auto* const stream = static_cast<cudaStream_t>(update.stream.native);
            const size_t bytes = update.master.size_bytes();
            const stand_in::Touched touched[] = {stand_in::Reads(arrays.gradient, bytes),
                                                 stand_in::Writes(arrays.master, bytes),
                                                 stand_in::Writes(arrays.states[0], bytes),
                                                 stand_in::Writes(arrays.states[1], bytes)};
            stand_in::NoteTouch(stream, "the trainer's Adam", touched);
            stand_in::EnqueueKernel(stream, Task([arrays] { RunAdam(arrays); }));
            return absl::OkStatus();
          }};
}

enum class Masters { kWhole, kSplit, kNone };

struct OwnCase {
  const char* name;
  DType compute = DType::kBFloat16;
  int stage = 3;
  Timing timing = Timing::kLate;
  Tier parameters = Tier::kDevice, states = Tier::kDevice;
  Masters masters = Masters::kWhole;
  double offloaded = 1;  // the part of the states that is not on the device
};
void PrintTo(const OwnCase& of, std::ostream* out) {
  *out << of.name;
}

constexpr DType kFp32 = DType::kFloat32, kFp16 = DType::kFloat16;
constexpr Tier kCpu = Tier::kCpu, kNvme = Tier::kNvme;
const OwnCase kCases[] = {
    {.name = "fp32_stage1_off", .compute = kFp32, .stage = 1, .timing = Timing::kOff},
    {.name = "bf16_stage0_early", .stage = 0, .timing = Timing::kEarly},
    {.name = "fp16_stage2", .compute = kFp16, .stage = 2},
    {.name = "split_masters_early", .timing = Timing::kEarly, .masters = Masters::kSplit},
    {.name = "no_masters", .masters = Masters::kNone},
    {.name = "states_on_cpu_early", .timing = Timing::kEarly, .states = kCpu},
    {.name = "half_of_the_states_on_cpu", .states = kCpu, .offloaded = 0.5},
    {.name = "no_masters_parameters_on_cpu", .parameters = kCpu, .masters = Masters::kNone},
    {.name = "all_on_nvme", .parameters = kNvme, .states = kNvme},
};

class OwnOptimizerOnGpuTest : public ::testing::TestWithParam<OwnCase> {
 protected:
  void TearDown() override { stand_in::Reset(); }

  Config MakeConfig() const {
    const OwnCase& of = GetParam();
    Config config = OnNvme(ConfigFor({.world = kRanks, .stage = of.stage, .timing = of.timing}),
                           scratch_.path());
    config.compute = of.compute;
    config.zero.offload_param.device = of.parameters;
    config.zero.offload_optimizer.device = of.states;
    config.zero.offload_optimizer.ratio = of.offloaded;
    config.loss_scale.initial_scale_power = 8;
    config.loss_scale.hysteresis = 1;
    if (of.timing != Timing::kEarly) config.gradient_clipping = 0.5;
    config.ebb.split_master = of.masters == Masters::kSplit;
    config.ebb.stochastic_rounding = of.masters == Masters::kNone;
    config.ebb.parameter_groups["bias"].lr_factor = 0.5;
    return config;
  }
  bool overflows() const { return GetParam().timing != Timing::kEarly; }

  struct Outcome {
    std::array<Snapshot, kRanks> left;
    std::array<std::map<int64_t, int>, kRanks> with_stream, without_stream;
    StepReport report;
  };
  Outcome Train(bool on_gpu) const {
    Outcome outcome;
    OnThreads(kRanks, [&](World world) {
      absl::StatusOr<Device> device = Device::Cpu(1);
      if (on_gpu) device = Device::Cuda();
      ASSERT_OK(device.status());
      const size_t rank = static_cast<size_t>(world.rank());
      ToyModel model({.width = 31, .groups = true}, *device);
      Calls calls;
      {
        ASSERT_OK_AND_ASSIGN(
            Engine engine,
            Engine::Create(world, *device, model.spec(), MakeConfig(), {.optimizer = Adam(calls)}));
        for (int step = 0; step < kSteps; ++step) {
          const bool blow_up = overflows() && step == kOverflow && world.rank() == kRanks - 1;
          ASSERT_OK(model.Train(engine, world.rank(), step, {}, blow_up));
        }
        ASSERT_OK_AND_ASSIGN(outcome.left[rank], TakeSnapshot(engine, model.spec()));
        ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
        if (rank == 0) outcome.report = report;
        for (const MemoryRow& row : engine.memory()) {
          if (row.state == StateClass::kDriver) continue;
          EXPECT_EQ(row.predicted_bytes, row.peak_bytes)
              << Name(row.state) << " " << Name(row.tier);
        }
      }
      outcome.with_stream[rank] = calls.with_stream();
      outcome.without_stream[rank] = calls.without_stream();
    });
    return outcome;
  }

  const Scratch scratch_;
};
INSTANTIATE_TEST_SUITE_P(Cases, OwnOptimizerOnGpuTest, ::testing::ValuesIn(kCases),
                         [](const auto& each) { return std::string(each.param.name); });

TEST_P(OwnOptimizerOnGpuTest, TrainsWithTheBitsOfTheCpuAndIsCalledForAppliedSteps) {
  const Outcome cpu = Train(/*on_gpu=*/false), gpu = Train(/*on_gpu=*/true);
  EXPECT_EQ(gpu.report.step, kSteps);
  EXPECT_EQ(gpu.report.skipped_steps, overflows() ? 1 : 0);
  EXPECT_EQ(gpu.report.gradient_norm, cpu.report.gradient_norm);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(gpu.left[rank].masters, cpu.left[rank].masters);
    EXPECT_EQ(gpu.left[rank].parameters, cpu.left[rank].parameters);
    EXPECT_EQ(gpu.left[rank].states, cpu.left[rank].states);
    // Each slice once in each applied step. On the CPU no call has a stream.
    EXPECT_TRUE(cpu.with_stream[rank].empty());
    std::map<int64_t, int> all = gpu.with_stream[rank];
    for (const auto& [step, calls] : gpu.without_stream[rank]) all[step] += calls;
    EXPECT_EQ(all, cpu.without_stream[rank]);
    EXPECT_EQ(all.size(), static_cast<size_t>(overflows() ? kSteps - 1 : kSteps));
    const bool all_on_device = GetParam().states == Tier::kDevice;
    EXPECT_EQ(gpu.without_stream[rank].empty(), all_on_device);
    EXPECT_EQ(gpu.with_stream[rank].empty(), !all_on_device && GetParam().offloaded == 1);
  }
  EXPECT_FALSE(cpu.left[0].masters.empty());
}

// On one rank. Late updates of the host run on after Finish, so a later step may report it.
TEST_P(OwnOptimizerOnGpuTest, ItsErrorFailsTheEngineOnEveryRank) {
  OnThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    ToyModel model({.width = 31, .groups = true}, device);
    Calls calls;
    OptimizerSpec spec = Adam(calls);
    spec.update = [&, adam = spec.update](const UpdateSlice& update) {
      const bool fails = world.rank() == 1 && update.step == 2;
      return fails ? absl::DataLossError("the moon is full") : adam(update);
    };
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), MakeConfig(),
                                                       {.optimizer = spec}));
    EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), 0));
    absl::Status failed;
    for (int step = 1; step < 5 && failed.ok(); ++step)
      failed = model.Train(engine, world.rank(), step);
    EXPECT_THAT(failed, Says("the engine has failed", "the moon is full", "in unit '"));
    EXPECT_FALSE(engine.Report().ok());
    EXPECT_FALSE(model.Train(engine, world.rank(), 5).ok());
    return absl::OkStatus();
  });
}

// Work that it enqueued would fail, and that error would hide the cause.
TEST_P(OwnOptimizerOnGpuTest, IsNotCalledOnceTheDeviceIsLost) {
  if (GetParam().states != Tier::kDevice || GetParam().timing != Timing::kLate) return;
  OnThreads(1, [&](World world) {
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ToyModel model({.width = 31, .groups = true}, device);
    Calls calls;
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model.spec(), MakeConfig(),
                                                       {.optimizer = Adam(calls)}));
    for (int step = 0; step < 2; ++step) ASSERT_OK(model.Train(engine, 0, step));
    std::map<int64_t, int> before;
    {
      Step step = engine.BeginStep();
      for (int visit = 0; visit < model.visits(); ++visit) model.Forward(step, visit, 0, 2);
      for (int visit = model.visits(); visit-- > 0;) model.Backward(step, visit, 0, 2);
      before = calls.with_stream();
      // When the host waits for the exchange, which is then in the queue.
      auto* const compute = static_cast<cudaStream_t>(engine.compute_stream().native);
      stand_in::HoldUntilHostWaits(compute);
      stand_in::EnqueueKernel(compute, Task([] { stand_in::LoseDevice(cudaErrorIllegalAddress); }));
      EXPECT_THAT(step.Finish(), Says("in step 3"));
    }
    EXPECT_FALSE(before.empty());
    EXPECT_EQ(calls.with_stream(), before);
  });
}

}  // namespace
}  // namespace ebb::testing::engine_own_optimizer_test
