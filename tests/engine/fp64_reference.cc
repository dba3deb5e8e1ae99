#include "tests/engine/fp64_reference.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ebb::testing {
namespace {

using Vector = Fp64Reference::Vector;

double Norm(const Vector& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

std::vector<OptimizerConfig> OptimizersOf(const ModelSpec& spec, const Config& config) {
  std::vector<OptimizerConfig> optimizers;
  for (const ParameterSpec& parameter : spec.parameters) {
    OptimizerConfig& own = optimizers.emplace_back(config.optimizer);
    const auto group = config.ebb.parameter_groups.find(parameter.group);
    if (group != config.ebb.parameter_groups.end()) {
      if (group->second.optimizer) own = *group->second.optimizer;
      if (group->second.weight_decay) own.weight_decay = *group->second.weight_decay;
    }
    if (own.type != OptimizerType::kMuon || parameter.shape.size() == 2) continue;
    own.type = OptimizerType::kAdamW;
    own.learning_rate = own.adam_learning_rate.value_or(own.learning_rate);
  }
  return optimizers;
}

}  // namespace

Fp64Reference::Fp64Reference(const ToyModel& model, const Config& config, Vectors weights)
    : model_(model),
      clipping_(config.gradient_clipping),
      optimizers_(OptimizersOf(model.spec(), config)),
      weights_(std::move(weights)) {
  for (const Vector& values : weights_) zeros_.emplace_back(values.size());
  momentum_ = variance_ = average_ = zeros_;
  for (size_t p = 0; p < weights_.size(); ++p) {
    if (OptimizerOf(p).type != OptimizerType::kAdagrad) continue;
    std::fill(variance_[p].begin(), variance_[p].end(), OptimizerOf(p).initial_accumulator_value);
  }
}

Fp64Reference::Report Fp64Reference::Step(int world, int micro_batches, int64_t number,
                                          bool overflows) {
  Vectors gradients = zeros_;
  Report report;
  for (int rank = 0; rank < world; ++rank) {
    for (int m = 0; m < micro_batches; ++m) report.loss += Sample(rank, m, number, gradients);
  }
  const double samples = world * micro_batches;
  report.loss /= samples;
  double squares = 0;
  for (size_t p = 0; p < gradients.size(); ++p) {
    if (!model_.spec().parameters[p].trainable) continue;
    for (double& g : gradients[p]) {
      g /= samples;
      squares += g * g;
    }
  }
  report.norm = std::sqrt(squares);
  if (overflows) return report;
  // Pascanu, Mikolov, Bengio 2013, algorithm 1.
  const double clip = clipping_ > 0 ? std::min(1.0, clipping_ / report.norm) : 1;
  ++applied_;
  for (size_t p = 0; p < weights_.size(); ++p) {
    if (!model_.spec().parameters[p].trainable) continue;
    for (double& g : gradients[p]) g *= clip;
    Update(p, gradients[p]);
  }
  return report;
}

void Fp64Reference::Update(size_t parameter, const Vector& gradient) {
  const OptimizerConfig& o = OptimizerOf(parameter);
  Vector &w = weights_[parameter], &m = momentum_[parameter], &v = variance_[parameter];
  if (o.type == OptimizerType::kMuon) return UpdateMatrix(o, gradient, w, m);
  if (TakesNorms(o.type)) return UpdateWhole(o, gradient, w, m, v);
  for (size_t i = 0; i < w.size(); ++i)
    UpdateElement(o, gradient[i], w[i], m[i], v[i], average_[parameter][i]);
}

double Fp64Reference::ScaleOf(const ToyModel::Layer& layer, size_t i) const {
  if (!layer.scale) return 1;
  const double value = Of(*layer.scale)[i];
  return model_.spec()[*layer.scale].compute == DType::kInt8 ? 0.5 + value / 256 : value;
}

// The loss of one sample; adds its gradients.
double Fp64Reference::Sample(int rank, int micro_batch, int64_t number, Vectors& gradients) const {
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
      x[at + 1][o] = ScaleOf(layer, o) * t[at][o];
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
      const double d = dy[o] * ScaleOf(layer, o) * (1 - t[at][o] * t[at][o]);
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

void Fp64Reference::UpdateElement(const OptimizerConfig& o, double g, double& w, double& m,
                                  double& v, double& a) const {
  if (o.type == OptimizerType::kLion) {  // Chen et al. 2023, algorithm 2
    const double blend = o.beta1 * m + (1 - o.beta1) * g;
    w -= o.learning_rate * ((blend > 0 ? 1 : blend < 0 ? -1 : 0) + o.weight_decay * w);
    m = o.beta2 * m + (1 - o.beta2) * g;
    return;
  }
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
    if (o.centered) a = o.alpha * a + (1 - o.alpha) * g;
    m = o.momentum * m + g / (std::sqrt(std::max(0.0, v - a * a)) + o.epsilon);
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

// Jordan et al. 2024, as torch.optim.Muon writes it. The toy's matrices are square.
void Fp64Reference::UpdateMatrix(const OptimizerConfig& o, const Vector& g, Vector& w,
                                 Vector& m) const {
  const auto n = static_cast<size_t>(model_.width());
  const auto product = [n](const Vector& a, const Vector& b, bool transposed) {
    Vector c(n * n);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j)
        for (size_t k = 0; k < n; ++k)
          c[i * n + j] += a[i * n + k] * (transposed ? b[j * n + k] : b[k * n + j]);
    return c;
  };
  Vector x(n * n);
  for (size_t i = 0; i < x.size(); ++i) {
    m[i] += (1 - o.momentum) * (g[i] - m[i]);
    x[i] = o.nesterov ? g[i] + o.momentum * (m[i] - g[i]) : m[i];
  }
  const double norm = std::max(Norm(x), 1e-7);
  for (double& value : x) value /= norm;
  const auto& [a, b, c] = o.newton_schulz_coefficients;
  for (int64_t step = 0; step < o.newton_schulz_steps; ++step) {
    const Vector gram = product(x, x, /*transposed=*/true), square = product(gram, gram, false);
    Vector polynomial(n * n);
    for (size_t i = 0; i < square.size(); ++i) polynomial[i] = b * gram[i] + c * square[i];
    const Vector further = product(polynomial, x, false);
    for (size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + further[i];
  }
  for (size_t i = 0; i < x.size(); ++i) w[i] -= o.learning_rate * (x[i] + o.weight_decay * w[i]);
}

// You et al. 2020, algorithm 2, with DeepSpeed's bounds of the ratio; You et al. 2017, algorithm 1,
// with the rate outside of the momentum.
void Fp64Reference::UpdateWhole(const OptimizerConfig& o, const Vector& g, Vector& w, Vector& m,
                                Vector& v) const {
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

}  // namespace ebb::testing
