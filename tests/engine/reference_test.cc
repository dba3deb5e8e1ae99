// The engine against the plain loop in fp64 of fp64_reference.h, with every optimizer. The matrix
// test also compares its cells with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/fp64_reference.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::reference_test {
namespace {

using Vectors = Fp64Reference::Vectors;
constexpr int kSteps = 4;

struct Optimizer {
  const char* name;
  OptimizerConfig config;
};
// Adam divides a gradient by its own size. A gradient of nothing but rounding would move its weight
// by a whole step, so epsilon is above such gradients here, and below the clipped ones' 1e-3.
const Optimizer kOptimizers[] = {
    {"AdamW",
     {.type = OptimizerType::kAdamW, .learning_rate = 0.01, .epsilon = 1e-4, .weight_decay = 0.1}},
    // Adam with the decay in the gradient.
    {"Adam",
     {.type = OptimizerType::kAdam,
      .learning_rate = 0.01,
      .epsilon = 1e-4,
      .weight_decay = 0.1,
      .decoupled_weight_decay = false}},
    {"Sgd",
     {.type = OptimizerType::kSgd, .learning_rate = 0.5, .weight_decay = 0.01, .momentum = 0.9}},
    {"Adagrad",
     {.type = OptimizerType::kAdagrad,
      .learning_rate = 0.1,
      .epsilon = 1e-4,
      .weight_decay = 0.01,
      .lr_decay = 0.1,
      .initial_accumulator_value = 1e-4}},
    {"Rmsprop",
     {.type = OptimizerType::kRmsprop,
      .learning_rate = 0.01,
      .epsilon = 1e-3,
      .weight_decay = 0.01,
      .momentum = 0.5,
      .alpha = 0.9}},
    {"Lamb",
     {.type = OptimizerType::kLamb, .learning_rate = 0.02, .epsilon = 1e-4, .weight_decay = 0.1}},
    {"Lars",
     {.type = OptimizerType::kLars,
      .learning_rate = 0.5,
      .weight_decay = 0.01,
      .momentum = 0.9,
      .trust_coefficient = 0.05}},
};

// The largest distance between engine and reference. Of the weights: relative to the distance that
// they moved (L2 over all, so 1 would mean nothing learned). Of loss and norm: relative.
//
// fp32: sums of 13 products through 5 visits and their way back, each rounded to 2^-24 = 6e-8, give
// gradients to some 1e-6 (longest chain: about 100 roundings). Adam's first steps divide g by |g|,
// so relative errors remain, except where gradients nearly cancel between steps.
//
// 16 bits: parameters, activations and their gradients are each rounded to u = 2^-9 (bf16) or 2^-12
// (fp16), and each visit takes rounded input. 5 visits, forward and backward, are about 15
// successive roundings, so 32 u if all have one sign and scales of 1.5 amplify them. The weights
// that Adam makes of it are as far off, the step being of the size of m / sqrt(v).
struct Tolerance {
  DType dtype;
  double weights, report;
};
constexpr Tolerance kTolerances[] = {
    {DType::kFloat32, 1e-5, 2e-6},
    {DType::kBFloat16, 32.0 / 512, 32.0 / 512},
    {DType::kFloat16, 32.0 / 4096, 32.0 / 4096},
};

class ReferenceTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, ReferenceTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

void Compare(const Setting& setting, const Optimizer& optimizer, int micro_batches,
             const Tolerance& tolerance) {
  Config config = ConfigFor(setting);
  config.compute = tolerance.dtype;
  config.optimizer = optimizer.config;
  config.gradient_accumulation_steps = micro_batches;
  config.gradient_clipping = 0.05;  // clips every step of this model
  config.loss_scale.initial_scale_power = 8;
  const auto train = [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    ToyModel model{ToyOptions{}};
    const auto masters = [&]() -> absl::StatusOr<Vectors> {
      EBB_ASSIGN_OR_RETURN(const ParameterValues values,
                           GatherAll(engine, model.spec(), StateClass::kMaster));
      Vectors wide;
      for (const std::vector<float>& of : values) wide.emplace_back(of.begin(), of.end());
      return wide;
    };
    EBB_ASSIGN_OR_RETURN(const Vectors first, masters());
    Fp64Reference reference(model, config, first);
    for (int number = 0; number < kSteps; ++number) {
      EBB_RETURN_IF_ERROR(model.Train(engine, trainer.rank(), number));
      EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
      const Fp64Reference::Report expected = reference.Step(setting.world, micro_batches, number);
      EXPECT_NEAR(report.loss, expected.loss, tolerance.report * expected.loss) << number;
      EXPECT_NEAR(report.gradient_norm, expected.norm, tolerance.report * expected.norm) << number;
      EXPECT_GT(expected.norm, config.gradient_clipping);
      EXPECT_TRUE(report.applied);
    }
    EBB_ASSIGN_OR_RETURN(const Vectors last, masters());
    double apart = 0, way = 0, farthest = 0;
    for (size_t p = 0; p < first.size(); ++p) {
      for (size_t i = 0; i < first[p].size(); ++i) {
        const double expected = reference.weights()[p][i], moved = expected - first[p][i];
        apart += (last[p][i] - expected) * (last[p][i] - expected);
        way += moved * moved;
        farthest = std::max(farthest, std::abs(moved));
      }
    }
    EXPECT_LT(std::sqrt(apart / way), tolerance.weights);
    // The way itself is far above the rounding of a weight, so its share above says something.
    EXPECT_GT(farthest, 0.01);
    EXPECT_GT(std::sqrt(way), 0.05);
    return absl::OkStatus();
  };
  const absl::Status status = RunEngines(setting, ToyModel(ToyOptions{}).spec(), config, train);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ReferenceTest, TrainsAsAPlainLoopInFp64Does) {
  for (const Optimizer& optimizer : kOptimizers) {
    for (const int micro_batches : {1, 3}) {
      for (const Tolerance& tolerance : kTolerances) {
        SCOPED_TRACE(::testing::Message() << optimizer.name << ", " << micro_batches
                                          << " micro-batches, " << Name(tolerance.dtype));
        Compare(GetParam(), optimizer, micro_batches, tolerance);
      }
    }
  }
}

}  // namespace
}  // namespace ebb::testing::reference_test
