// The optimizers' rules element by element, one rounding in each line, for comparison with every
// kernel's bits.
#pragma once

#include <cmath>

#include "ebb/optim/update.h"

namespace ebb::optim {

// beta * average + (1 - beta) * g, as a step from the one with the larger weight.
inline float ReferenceAverage(double beta, float average, float g) {
  const float difference = g - average;
  return beta < 0.5 ? std::fma(-float(beta), difference, g)
                    : std::fma(float(1 - beta), difference, average);
}

// The reference: update.h's rules, element by element, one rounding in each line.
inline void ReferenceAdam(const OptimizerConfig& o, const UpdateScalars& s, float gradient,
                          float& p, float& m, float& v) {
  const double beta1 = s.beta1 < 0 ? o.beta1 : s.beta1, beta2 = s.beta2 < 0 ? o.beta2 : s.beta2;
  const double correction1 = o.bias_correction ? 1 - std::pow(beta1, s.step) : 1;
  const double correction2 = o.bias_correction ? 1 - std::pow(beta2, s.step) : 1;
  float g = s.gradient_factor * gradient;
  if (!o.decoupled_weight_decay && o.weight_decay != 0) g = std::fma(float(o.weight_decay), p, g);
  m = ReferenceAverage(beta1, m, g);
  const float weighted = float(1 - beta2) * g;
  const float kept = float(beta2) * v;
  v = std::fma(weighted, g, kept);
  const float root = std::sqrt(v);
  const float denominator = std::fma(root, float(1 / std::sqrt(correction2)), float(o.epsilon));
  const float ratio = m / denominator;
  if (o.decoupled_weight_decay) p = p * float(1 - s.learning_rate * o.weight_decay);
  p = std::fma(float(-s.learning_rate / correction1), ratio, p);
}

inline void ReferenceSgd(const OptimizerConfig& o, const UpdateScalars& s, float gradient, float& p,
                         float& m) {
  float g = s.gradient_factor * gradient;
  if (o.weight_decay != 0) g = std::fma(float(o.weight_decay), p, g);
  if (o.momentum != 0) {
    const float fresh = float(1 - o.dampening) * g;
    m = s.step == 1 ? g : std::fma(float(o.momentum), m, fresh);
    g = o.nesterov ? std::fma(float(o.momentum), m, g) : m;
  }
  p = std::fma(float(-s.learning_rate), g, p);
}

inline void ReferenceLion(const OptimizerConfig& o, const UpdateScalars& s, float gradient,
                          float& p, float& m) {
  const double beta1 = s.beta1 < 0 ? o.beta1 : s.beta1, beta2 = s.beta2 < 0 ? o.beta2 : s.beta2;
  const float g = s.gradient_factor * gradient;
  const float mixed = ReferenceAverage(beta1, m, g);
  const float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed;
  m = ReferenceAverage(beta2, m, g);
  p = p * float(1 - s.learning_rate * o.weight_decay);
  p = std::fma(float(-s.learning_rate), sign, p);
}

inline void ReferenceAdagrad(const OptimizerConfig& o, const UpdateScalars& s, float gradient,
                             float& p, float& sum) {
  const double slowed = 1 + static_cast<double>(s.step - 1) * o.lr_decay;
  float g = s.gradient_factor * gradient;
  if (o.weight_decay != 0) g = std::fma(float(o.weight_decay), p, g);
  sum = std::fma(g, g, sum);
  const float root = std::sqrt(sum);
  const float denominator = root + float(o.epsilon);
  const float ratio = g / denominator;
  p = std::fma(float(-s.learning_rate / slowed), ratio, p);
}

// `states`: the average of squares, then the averages of momentum and of the gradient, if it has
// them.
inline void ReferenceRmsprop(const OptimizerConfig& o, const UpdateScalars& s, float gradient,
                             float& p, float* const (&states)[3]) {
  float& square = *states[0];
  float g = s.gradient_factor * gradient;
  if (o.weight_decay != 0) g = std::fma(float(o.weight_decay), p, g);
  const float fresh = (1 - float(o.alpha)) * g;
  const float kept = float(o.alpha) * square;
  square = std::fma(fresh, g, kept);
  float variance = square;
  if (o.centered) {
    float& average = *states[o.momentum != 0 ? 2 : 1];
    average = std::fma(float(o.alpha), average, fresh);
    variance = std::fma(-average, average, square);
    if (variance < 0) variance = 0;
  }
  const float root = std::sqrt(variance);
  const float denominator = root + float(o.epsilon);
  float step = g / denominator;
  if (o.momentum != 0) {
    float& buffer = *states[1];
    buffer = std::fma(float(o.momentum), buffer, step);
    step = buffer;
  }
  p = std::fma(float(-s.learning_rate), step, p);
}

// The direction of LAMB's update, from the updated moments.
inline float ReferenceLambDirection(const OptimizerConfig& o, const UpdateScalars& s,
                                    float gradient, float p, float& m, float& v) {
  const double beta1 = s.beta1 < 0 ? o.beta1 : s.beta1, beta2 = s.beta2 < 0 ? o.beta2 : s.beta2;
  const double correction1 = o.bias_correction ? 1 - std::pow(beta1, s.step) : 1;
  const double correction2 = o.bias_correction ? 1 - std::pow(beta2, s.step) : 1;
  const float g = s.gradient_factor * gradient;
  m = ReferenceAverage(beta1, m, g);
  const float weighted = float(1 - beta2) * g;
  const float kept = float(beta2) * v;
  v = std::fma(weighted, g, kept);
  float denominator;
  if (o.epsilon_inside_root) {
    const float inside = std::fma(v, float(1 / correction2), float(o.epsilon));
    denominator = std::sqrt(inside);
  } else {
    const float root = std::sqrt(v);
    denominator = std::fma(root, float(std::sqrt(1 / correction2)), float(o.epsilon));
  }
  const float corrected = float(1 / correction1) * m;
  const float ratio = corrected / denominator;
  return std::fma(float(o.weight_decay), p, ratio);
}

inline void ReferenceLamb(const OptimizerConfig& o, const UpdateScalars& s, float gradient,
                          float& p, float& m, float& v) {
  const float u = ReferenceLambDirection(o, s, gradient, p, m, v);
  p = std::fma(float(-s.learning_rate * s.trust_ratio), u, p);
}

inline void ReferenceLars(const OptimizerConfig& o, const UpdateScalars& s, float gradient,
                          float& p, float& m) {
  float g = s.gradient_factor * gradient;
  if (o.weight_decay != 0) g = std::fma(float(o.weight_decay), p, g);
  g = float(s.trust_ratio) * g;
  if (o.momentum != 0) {
    const float fresh = float(1 - o.dampening) * g;
    m = s.step == 1 ? g : std::fma(float(o.momentum), m, fresh);
    g = o.nesterov ? std::fma(float(o.momentum), m, g) : m;
  }
  p = std::fma(float(-s.learning_rate), g, p);
}

// Muon's first pass returns the direction; the second takes what became of it.
inline float ReferenceMuonDirection(const OptimizerConfig& o, const UpdateScalars& s,
                                    float gradient, float& m) {
  const float g = s.gradient_factor * gradient;
  const float change = g - m;
  m = std::fma(float(1 - o.momentum), change, m);
  if (!o.nesterov) return m;
  const float further = m - g;
  return std::fma(float(o.momentum), further, g);
}
inline void ReferenceMuon(const OptimizerConfig& o, const UpdateScalars& s, float direction,
                          float& p) {
  p = p * float(1 - s.learning_rate * o.weight_decay);
  p = std::fma(float(-s.learning_rate), direction, p);
}

// One element by its optimizer's rule.
inline void Reference(const OptimizerConfig& o, const UpdateScalars& s, float gradient, float& p,
                      float* const (&states)[3]) {
  switch (o.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      return ReferenceAdam(o, s, gradient, p, *states[0], *states[1]);
    case OptimizerType::kSgd:
      return ReferenceSgd(o, s, gradient, p, *states[0]);
    case OptimizerType::kLion:
      return ReferenceLion(o, s, gradient, p, *states[0]);
    case OptimizerType::kAdagrad:
      return ReferenceAdagrad(o, s, gradient, p, *states[0]);
    case OptimizerType::kRmsprop:
      return ReferenceRmsprop(o, s, gradient, p, states);
    case OptimizerType::kLamb:
      return ReferenceLamb(o, s, gradient, p, *states[0], *states[1]);
    case OptimizerType::kLars:
      return ReferenceLars(o, s, gradient, p, *states[0]);
    case OptimizerType::kMuon:
      return ReferenceMuon(o, s, gradient, p);
  }
}

}  // namespace ebb::optim
