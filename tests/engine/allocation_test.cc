// Nothing is allocated once every kind of step and evaluation has run: counted over all threads of
// all ranks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <barrier>

#include "absl/strings/str_cat.h"
#include "tests/device/allocation_counter.h"
#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing {
namespace {

// Counts start after two steps of each kind.
constexpr int kWarmUpSteps = 2, kCountedSteps = 4, kRoundsMax = 10;

// A trainer that allocates nothing itself.
void Train(Engine& engine, const ModelSpec& model, const StepOptions& options) {
  Step step = engine.BeginStep(options);
  float loss = 0;
  for (int round = 0; round < step.rounds(); ++round) {
    for (const Visit& visit : model.forward) {
      ForwardScope scope = step.Forward(visit.unit);
      for (ParameterId p : model[visit.unit].parameters)
        loss += static_cast<float>(scope.parameter(p).size());
    }
    step.AddLoss({.data = &loss});
    for (size_t v = model.forward.size(); v-- > 0;) {
      BackwardScope scope = step.Backward(model.forward[v].unit);
      for (ParameterId p : model[model.forward[v].unit].parameters) {
        if (!model[p].trainable) continue;
        WithNumbers(scope.gradient(p), [](auto gradient) {
          using T = typename decltype(gradient)::value_type;
          for (T& value : gradient) value = T(static_cast<float>(value) + 0.25f);
        });
      }
    }
  }
  EXPECT_OK(step.Finish());
  EXPECT_OK(engine.Report());
}

void Evaluate(Engine& engine, const ModelSpec& model) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (const Visit& visit : model.forward) evaluation.Forward(visit.unit);
  EXPECT_OK(evaluation.Finish());
}

class AllocationTest : public ::testing::TestWithParam<Setting> {
 protected:
  static int64_t Count(const Setting& setting, Config config) {
    std::barrier all(setting.world);
    int64_t counted = -1;
    const ModelSpec model = ScriptedModel();
    config.gradient_accumulation_steps = 2;
    const absl::Status status =
        RunEngines(setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
          int64_t before = 0;
          const auto steps = [&](int count) {
            for (int s = 0; s < count; ++s) {
              Train(engine, model, {});
              Train(engine, model, {.micro_batches = 1, .hold_updates = true});
              // By then the logs of opened scopes have room for the longest step. Nothing else
              // depends on how many rounds there are.
              Train(engine, model, {.micro_batches = count == kCountedSteps ? 3 + s : kRoundsMax});
              Evaluate(engine, model);
            }
          };
          steps(kWarmUpSteps);
          all.arrive_and_wait();
          if (trainer.rank() == 0) before = Allocations();
          all.arrive_and_wait();
          steps(kCountedSteps);
          all.arrive_and_wait();
          if (trainer.rank() == 0) counted = Allocations() - before;
          all.arrive_and_wait();
          return absl::OkStatus();
        });
    EXPECT_OK(status);
    return counted;
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, AllocationTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 0})), NameOf);

TEST_P(AllocationTest, StepsAllocateNothing) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t coalesce : {0, 1200}) {
        SCOPED_TRACE(::testing::Message() << setting << ", " << std::string(Name(dtype))
                                          << ", coalesce_bytes " << coalesce);
        Config config = ConfigFor(setting);
        config.compute = dtype;
        config.ebb.coalesce_bytes = coalesce;
        EXPECT_EQ(Count(setting, config), 0);
      }
    }
  }
}

class SecondaryAllocationTest : public AllocationTest {};
INSTANTIATE_TEST_SUITE_P(Cells, SecondaryAllocationTest,
                         ::testing::Values(Setting{.world = 4, .stage = 3}), NameOf);

TEST_P(SecondaryAllocationTest, StepsAllocateNothing) {
  Config config = ConfigFor(GetParam());
  config.zero.hpz_partition_size = 2;
  EXPECT_EQ(Count(GetParam(), config), 0);
}

TEST_P(AllocationTest, NorDoNormsOfParameters) {
  Config config = ConfigFor(GetParam());
  config.optimizer.type = OptimizerType::kLamb;
  EXPECT_EQ(Count(GetParam(), config), 0);
}

TEST_P(AllocationTest, NorDoTracedSteps) {
  Config config = ConfigFor(GetParam());
  config.ebb.trace = absl::StrCat(::testing::TempDir(), "allocation_test.", getpid(), ".json");
  EXPECT_EQ(Count(GetParam(), config), 0);
  unlink(config.ebb.trace.c_str());
}

}  // namespace
}  // namespace ebb::testing
