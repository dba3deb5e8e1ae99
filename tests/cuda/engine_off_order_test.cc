// Scopes that are not the declared order's next, and evaluations within steps, on a GPU. Kernels
// run long after the host has enqueued them, so operations that are inserted into the plan's must
// be ordered with them. The stand-in checks the order of all memory accesses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "stand_in.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::engine_off_order_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kBytes = int64_t{8} << 20, kAlignment = 64;

// Copies parameters out and gradients in, in the order of the compute stream, and never waits for
// that stream.
class Trainer {
 public:
  Trainer(const ModelSpec& model, const Device& device, int rank)
      : model_(model),
        stream_(device.CallerStream()),
        memory_(*device.AllocateShared(kBytes, "what is copied")),
        rank_(rank) {}

  void Look(const Scope& scope, int unit, int64_t number) {
    for (const ParameterId p : model_.units[static_cast<size_t>(unit)].parameters) {
      const TensorView view = scope.parameter(p);
      std::byte* const kept = Take(view.size() * SizeOf(view.dtype));
      stream_.Copy(kept, view.data, view.size() * SizeOf(view.dtype));
      TensorView shown = view;
      shown.data = kept;
      looks_.push_back({number, p, shown});
    }
  }
  void Backward(Step& step, int visit, int64_t number) {
    const int unit = kScriptedUnits[visit];
    BackwardScope scope = step.Backward(UnitId{unit});
    Look(scope, unit, number);
    for (const ParameterId p : model_.units[static_cast<size_t>(unit)].parameters) {
      if (!model_[p].trainable) continue;
      const MutableTensorView view = scope.fused_gradient(p).tensor;
      std::vector<float> values(static_cast<size_t>(view.size()));
      for (size_t i = 0; i < values.size(); ++i)
        values[i] =
            static_cast<float>(
                (static_cast<int64_t>(i) * 5 + number * 3 + rank_ * 7 + visit * 11) % 17 - 8) /
            8;
      const int64_t bytes = view.size() * SizeOf(view.dtype);
      std::byte* const sent = Take(bytes);
      std::fill_n(sent, bytes, std::byte{0});
      AddTo(MutableTensorView{.data = sent, .dtype = view.dtype, .shape = view.shape}, values);
      stream_.Copy(view.data, sent, bytes);
    }
  }
  // Call it once the device has done all: within a step a parameter has the same value wherever it
  // was shown.
  void ExpectOneValueInEachStep() {
    stream_.WaitIdle();
    std::map<std::pair<int64_t, ParameterId>, std::vector<float>> first;
    for (const LookAt& look : looks_) {
      const std::vector<float> values = Values(look.shown);
      const auto [at, is_first] = first.emplace(std::pair(look.step, look.parameter), values);
      EXPECT_TRUE(values == at->second) << model_[look.parameter].name << " in step " << look.step;
    }
    looks_.clear();
    end_ = 0;
  }

 private:
  std::byte* Take(int64_t bytes) {
    const int64_t at = end_;
    end_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    EXPECT_LE(end_, kBytes);
    return memory_.data() + at;
  }

  struct LookAt {
    int64_t step;
    ParameterId parameter;
    TensorView shown;
  };
  const ModelSpec& model_;
  Stream stream_;
  Buffer memory_;  // each copy has its own place
  int64_t end_ = 0;
  std::vector<LookAt> looks_;
  const int rank_;
};

struct OffOrder {
  Tier tier = Tier::kDevice;
  bool early = false;
};
std::ostream& operator<<(std::ostream& out, const OffOrder& of) {
  return out << std::string(Name(of.tier)) << (of.early ? "_early" : "_late");
}

class EngineOffOrderTest : public ::testing::TestWithParam<OffOrder> {
 protected:
  using Script = std::function<void(Engine&, Trainer&, Step&, int64_t number)>;
  using Before = std::function<absl::Status(Engine&, int64_t number)>;

  static void SetUpTestSuite() { setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0); }
  void TearDown() override { stand_in::Reset(); }

  // `before`: each step; null: nothing.
  ParameterValues Train(bool on_gpu, const Script& script, const Before& before = nullptr) const {
    Config config;
    config.micro_batch_size = 1;
    config.gradient_accumulation_steps = 2;
    config.compute = DType::kBFloat16;
    config.zero.stage = 3;
    config.zero.param_persistence_threshold = 0;
    config.zero.sub_group_size = 40;
    config.optimizer.learning_rate = 1e-2;
    config.ebb.prefetch_depth = 2;
    config.ebb.coalesce_bytes = 0;
    config.ebb.timeout_seconds = 60;
    if (GetParam().early) {
      config.gradient_clipping = 0;
      config.ebb.check_overflow = false;
    }
    const char* given = std::getenv("TEST_TMPDIR");
    config.zero.offload_param.nvme_paths =
        config.zero.offload_optimizer.nvme_paths = {given == nullptr ? "/tmp" : given};
    config.zero.offload_param.device = config.zero.offload_optimizer.device = GetParam().tier;
    config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = false;
    if (GetParam().tier == Tier::kNvme) config.zero.offload_param.max_in_cpu = 0;

    ParameterValues masters;
    const ModelSpec model = ScriptedModel();
    OnThreads(kRanks, [&](World world) {
      absl::StatusOr<Device> device = Device::Cpu(1);
      if (on_gpu) device = Device::Cuda();
      ASSERT_OK(device.status());
      Trainer trainer(model, *device, world.rank());
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, *device, model, config));
      for (int64_t number = 0; number < 4; ++number) {
        if (before != nullptr) ASSERT_OK(before(engine, number));
        Step step = engine.BeginStep({.may_leave_out = true});
        script(engine, trainer, step, number);
        ASSERT_OK(step.Finish());
        if (number % 2 == 1) trainer.ExpectOneValueInEachStep();
      }
      ASSERT_OK(engine.Report().status());
      ASSERT_OK_AND_ASSIGN(ParameterValues all, GatherAll(engine, model, StateClass::kMaster));
      if (world.rank() == 0) masters = std::move(all);
    });
    return masters;
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, EngineOffOrderTest,
                         ::testing::Values(OffOrder{Tier::kDevice, false},
                                           OffOrder{Tier::kDevice, true},
                                           OffOrder{Tier::kCpu, false}, OffOrder{Tier::kCpu, true},
                                           OffOrder{Tier::kNvme, false},
                                           OffOrder{Tier::kNvme, true}),
                         ::testing::PrintToStringParamName());

// The scripted model's visits in the order in which they come.
void TrainInOrder(std::span<const int> visits, Trainer& trainer, Step& step, int64_t number) {
  for (int round = 0; round < step.rounds(); ++round) {
    for (const int visit : visits) {
      const int unit = kScriptedUnits[visit];
      trainer.Look(step.Forward(UnitId{unit}), unit, number);
    }
    for (size_t i = visits.size(); i-- > 0;) trainer.Backward(step, visits[i], number);
  }
}
constexpr int kInOrder[] = {0, 1, 2, 3, 4, 5}, kShuffled[] = {3, 5, 2, 4, 0, 1};

TEST_P(EngineOffOrderTest, HasTheBitsOfTheDeclaredOrderOnTheCpu) {
  const auto declared = [](Engine&, Trainer& trainer, Step& step, int64_t number) {
    TrainInOrder(kInOrder, trainer, step, number);
  };
  const auto off_order = [](Engine& engine, Trainer& trainer, Step& step, int64_t number) {
    const auto forward = [&](int unit) { trainer.Look(step.Forward(UnitId{unit}), unit, number); };
    const auto evaluate = [&] {
      Evaluation evaluation = engine.BeginEvaluation();
      for (int unit : kScriptedUnits) trainer.Look(evaluation.Forward(UnitId{unit}), unit, number);
      EXPECT_OK(evaluation.Finish());
    };
    for (int round = 0; round < step.rounds(); ++round) {
      if (number > 1) evaluate();
      forward(0);
      {
        const ForwardScope held = step.Forward(UnitId{1});
        forward(2);
        trainer.Look(held, 1, number);
      }
      forward(1);
      for (int unit : {3, 4, 2, 0}) forward(unit);
      if (number % 2 == 1) evaluate();
      for (int unit : {1, 2, 3}) forward(unit);
      trainer.Backward(step, 5, number);
      for (int unit : {3, 1}) forward(unit);
      for (int visit : {4, 3}) trainer.Backward(step, visit, number);
      forward(1);
      for (int visit : {1, 0}) trainer.Backward(step, visit, number);
    }
  };
  const ParameterValues masters = Train(/*on_gpu=*/false, declared);
  ASSERT_FALSE(masters.empty());
  EXPECT_EQ(Train(/*on_gpu=*/true, declared), masters);
  EXPECT_EQ(Train(/*on_gpu=*/false, off_order), masters);
  EXPECT_EQ(Train(/*on_gpu=*/true, off_order), masters);
}

TEST_P(EngineOffOrderTest, AnotherOrderBetweenStepsHasThemToo) {
  const auto declared = [](Engine&, Trainer& trainer, Step& step, int64_t number) {
    TrainInOrder(kInOrder, trainer, step, number);
  };
  const auto order_of = [](int64_t number) -> std::span<const int> {
    return number % 2 == 0 ? kInOrder : kShuffled;
  };
  const auto reordered = [&](Engine&, Trainer& trainer, Step& step, int64_t number) {
    TrainInOrder(order_of(number), trainer, step, number);
  };
  const auto reorder = [&](Engine& engine, int64_t number) {
    std::vector<Visit> forward;
    for (const int visit : order_of(number))
      forward.push_back({.unit = UnitId{kScriptedUnits[visit]}});
    return engine.Reorder(std::move(forward));
  };
  EXPECT_EQ(Train(/*on_gpu=*/true, reordered, reorder), Train(/*on_gpu=*/false, declared));
}

}  // namespace
}  // namespace ebb::testing::engine_off_order_test
