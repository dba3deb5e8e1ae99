// The engine against a plain loop in fp64 that knows nothing of it: its own forward and backward of
// the toy model's chain y = s tanh(w x + b), its own optimizers from the papers, no shards, no
// casts, no loss scale.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {
namespace {

using Vector = std::vector<double>;
using Vectors = std::vector<Vector>;  // by parameter
constexpr int kSteps = 4;

struct Optimizer {
  const char* name;
  OptimizerConfig config;
};
// Adam divides a gradient by its own size, so one that is nothing but rounding would move its
// weight by a whole step: epsilon is above such gradients here, and below the clipped ones' 1e-3.
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

struct Report {
  double loss = 0, norm = 0;
};

class Reference {
 public:
  Reference(const ToyModel& model, const Config& config, Vectors weights)
      : model_(model), config_(config), weights_(std::move(weights)) {
    for (const Vector& values : weights_) zeros_.emplace_back(values.size());
    momentum_ = variance_ = zeros_;
    if (config.optimizer.type == OptimizerType::kAdagrad) {
      for (Vector& sums : variance_)
        std::fill(sums.begin(), sums.end(), config.optimizer.initial_accumulator_value);
    }
  }

  Report Step(int world, int micro_batches, int64_t number) {
    Vectors gradients = zeros_;
    Report report;
    for (int rank = 0; rank < world; ++rank) {
      for (int m = 0; m < micro_batches; ++m) report.loss += Sample(rank, m, number, gradients);
    }
    const double samples = world * micro_batches;
    report.loss /= samples;
    double squares = 0;
    for (Vector& gradient : gradients) {
      for (double& g : gradient) {
        g /= samples;
        squares += g * g;
      }
    }
    report.norm = std::sqrt(squares);
    // Pascanu, Mikolov, Bengio 2013, algorithm 1.
    const double clip = std::min(1.0, config_.gradient_clipping / report.norm);
    ++applied_;
    for (size_t p = 0; p < weights_.size(); ++p) {
      if (!model_.spec().parameters[p].trainable) continue;
      if (TakesNorms(config_.optimizer.type)) {
        for (double& g : gradients[p]) g *= clip;
        UpdateWhole(gradients[p], weights_[p], momentum_[p], variance_[p]);
        continue;
      }
      for (size_t i = 0; i < weights_[p].size(); ++i)
        Update(clip * gradients[p][i], weights_[p][i], momentum_[p][i], variance_[p][i]);
    }
    return report;
  }
  const Vectors& weights() const { return weights_; }

 private:
  const Vector& Of(ParameterId p) const { return weights_[static_cast<size_t>(p)]; }

  // The loss of one sample; adds its gradients.
  double Sample(int rank, int micro_batch, int64_t number, Vectors& gradients) const {
    const size_t n = static_cast<size_t>(model_.width());
    const int visits = model_.visits();
    std::vector<Vector> x(static_cast<size_t>(visits) + 1, Vector(n)), t = x;
    for (size_t i = 0; i < n; ++i) x[0][i] = ToyInput(rank, number, micro_batch, i);
    for (int v = 0; v < visits; ++v) {
      const ToyModel::Layer& layer = model_.layer(v);
      const size_t at = static_cast<size_t>(v);
      for (size_t o = 0; o < n; ++o) {
        double sum = layer.bias ? Of(*layer.bias)[o] : 0;
        for (size_t k = 0; k < n; ++k) sum += Of(layer.weight)[o * n + k] * x[at][k];
        t[at][o] = std::tanh(sum);
        x[at + 1][o] = (layer.scale ? Of(*layer.scale)[o] : 1) * t[at][o];
      }
    }
    double loss = 0;
    Vector dy(n);
    for (size_t o = 0; o < n; ++o) {
      const double error = x.back()[o] - ToyTarget(rank, number, o);
      loss += error * error / static_cast<double>(n);
      dy[o] = 2 * error / static_cast<double>(n);
    }
    for (int v = visits - 1; v >= 0; --v) {
      const ToyModel::Layer& layer = model_.layer(v);
      const size_t at = static_cast<size_t>(v);
      Vector dx(n);
      for (size_t o = 0; o < n; ++o) {
        const double scale = layer.scale ? Of(*layer.scale)[o] : 1;
        const double d = dy[o] * scale * (1 - t[at][o] * t[at][o]);
        if (layer.bias) gradients[static_cast<size_t>(*layer.bias)][o] += d;
        for (size_t k = 0; k < n; ++k) {
          gradients[static_cast<size_t>(layer.weight)][o * n + k] += d * x[at][k];
          dx[k] += d * Of(layer.weight)[o * n + k];
        }
      }
      dy = dx;
    }
    return loss;
  }

  void Update(double g, double& w, double& m, double& v) const {
    const OptimizerConfig& o = config_.optimizer;
    if (o.type == OptimizerType::kSgd) {  // Sutskever et al. 2013, as torch.optim.SGD writes it
      g += o.weight_decay * w;
      m = applied_ == 1 ? g : o.momentum * m + g;
      w -= o.learning_rate * m;
      return;
    }
    if (o.type == OptimizerType::kAdagrad) {  // Duchi, Hazan & Singer 2011, as torch writes it
      g += o.weight_decay * w;
      v += g * g;
      w -= o.learning_rate / (1 + (applied_ - 1) * o.lr_decay) * g / (std::sqrt(v) + o.epsilon);
      return;
    }
    if (o.type == OptimizerType::kRmsprop) {  // Tieleman & Hinton 2012, as torch writes it
      g += o.weight_decay * w;
      v = o.alpha * v + (1 - o.alpha) * g * g;
      m = o.momentum * m + g / (std::sqrt(v) + o.epsilon);
      w -= o.learning_rate * m;
      return;
    }
    // Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2, lines 6 and 12.
    if (o.type == OptimizerType::kAdam) g += o.weight_decay * w;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, applied_));
    const double v_hat = v / (1 - std::pow(o.beta2, applied_));
    const double decay = o.type == OptimizerType::kAdamW ? o.weight_decay * w : 0;
    w -= o.learning_rate * (m_hat / (std::sqrt(v_hat) + o.epsilon) + decay);
  }

  static double Norm(const Vector& values) {
    double squares = 0;
    for (const double value : values) squares += value * value;
    return std::sqrt(squares);
  }

  // You et al. 2020, algorithm 2, with DeepSpeed's bounds of the ratio; You et al. 2017, algorithm 1, with the
  // rate outside of the momentum.
  void UpdateWhole(const Vector& g, Vector& w, Vector& m, Vector& v) const {
    const OptimizerConfig& o = config_.optimizer;
    Vector u(w.size());
    if (o.type == OptimizerType::kLars) {
      const double ratio =
          o.trust_coefficient * Norm(w) / (Norm(g) + o.weight_decay * Norm(w) + o.epsilon);
      for (size_t i = 0; i < w.size(); ++i) {
        m[i] = o.momentum * m[i] + ratio * (g[i] + o.weight_decay * w[i]);
        w[i] -= o.learning_rate * m[i];
      }
      return;
    }
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(o.beta1, applied_));
      const double v_hat = v[i] / (1 - std::pow(o.beta2, applied_));
      u[i] = m_hat / (std::sqrt(v_hat) + o.epsilon) + o.weight_decay * w[i];
    }
    const double ratio = std::clamp(Norm(w) / Norm(u), o.min_coefficient, o.max_coefficient);
    for (size_t i = 0; i < w.size(); ++i) w[i] -= o.learning_rate * ratio * u[i];
  }

  const ToyModel& model_;
  Config config_;
  Vectors weights_, zeros_, momentum_, variance_;
  int applied_ = 0;
};

// How far the engine may be from the reference: of the weights, the distance over the length of the
// way that they went (L2 over all, so that 1 would mean nothing learned); of loss and norm,
// relative.
//
// fp32: sums of 13 products through 5 visits and their way back, each rounded to 2^-24 = 6e-8, give
// gradients to some 1e-6 (longest chain: about 100 roundings). Adam's first steps divide g by |g|:
// what is relative stays relative, except where gradients nearly cancel between steps.
//
// 16 bits: parameters, activations and their gradients are each rounded to u = 2^-9 (bf16) or 2^-12
// (fp16), and each visit works on what was rounded before it: 5 visits and their way back are about
// 15 roundings one upon the other, so 32 u where they all point one way and scales of 1.5 amplify
// them. The weights that Adam makes of it are as far off, the step being of the size of m /
// sqrt(v).
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
    Reference reference(model, config, first);
    for (int number = 0; number < kSteps; ++number) {
      EBB_RETURN_IF_ERROR(model.Train(engine, trainer.rank(), number));
      EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
      const Report expected = reference.Step(setting.world, micro_batches, number);
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
}  // namespace ebb::testing
