// The arithmetic of blocks that tensor ranks share, each with some of the hidden elements:
//
//   y = sum over tensor ranks of down tanh(up (gain x) + up_bias)  +  down_bias
//
// `up` is [hidden, width], `down` is [width, hidden]. `gain` and `down_bias` are whole on each rank.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/ebb.h"

namespace ebb::testing {

using Vector = std::vector<float>;

inline constexpr int kBlocks = 2, kWidth = 6;
enum TensorRole { kUp, kUpBias, kDown, kGain, kDownBias, kRoles };
inline ParameterId Of(int block, TensorRole role) {
  return static_cast<ParameterId>(block * kRoles + role);
}

// A sample, and what a model learns to make of it.
inline Vector TensorInput(int64_t number, int sample) {
  Vector x(kWidth);
  for (size_t i = 0; i < kWidth; ++i)
    x[i] = std::cos(static_cast<float>(i) * 1.7f + static_cast<float>(number) +
                    5 * static_cast<float>(sample));
  return x;
}
inline float TensorTarget(size_t i) {
  return 0.3f * static_cast<float>(i);
}
// The loss of the model's output, and its gradient times `scale`.
inline float TensorLoss(const Vector& y, float scale, Vector& dy) {
  float loss = 0;
  dy.resize(kWidth);
  for (size_t i = 0; i < kWidth; ++i) {
    const float error = y[i] - TensorTarget(i);
    loss += error * error / 2;
    dy[i] = error * scale;
  }
  return loss;
}

using SumOverTensor = absl::FunctionRef<void(Vector&)>;

// Values of a block's parameters on this rank.
struct TensorBlock {
  size_t hidden = 0;  // elements of this rank
  Vector up, up_bias, down, gain, down_bias;
};
struct TensorKept {
  Vector x, z, h;
};

inline Vector BlockForward(const TensorBlock& of, const Vector& x, SumOverTensor sum_over_tensor,
                           TensorKept& kept) {
  kept = {x, x, Vector(of.hidden)};
  for (size_t i = 0; i < kWidth; ++i) kept.z[i] = of.gain[i] * x[i];
  Vector y(kWidth);
  for (size_t j = 0; j < of.hidden; ++j) {
    float sum = of.up_bias[j];
    for (size_t i = 0; i < kWidth; ++i) sum += of.up[j * kWidth + i] * kept.z[i];
    kept.h[j] = std::tanh(sum);
    for (size_t i = 0; i < kWidth; ++i) y[i] += of.down[i * of.hidden + j] * kept.h[j];
  }
  sum_over_tensor(y);
  for (size_t i = 0; i < kWidth; ++i) y[i] += of.down_bias[i];
  return y;
}

// The gradients of the parameters but down_bias, whose gradient is dy, and of the input.
struct TensorGradients {
  Vector up, up_bias, down, gain, x;
};
inline TensorGradients BlockBackward(const TensorBlock& of, const TensorKept& kept,
                                     const Vector& dy, SumOverTensor sum_over_tensor) {
  TensorGradients d{Vector(of.hidden * kWidth), Vector(of.hidden), Vector(kWidth * of.hidden),
                    Vector(kWidth), Vector(kWidth)};
  Vector dz(kWidth);
  for (size_t j = 0; j < of.hidden; ++j) {
    float dh = 0;
    for (size_t i = 0; i < kWidth; ++i) {
      dh += of.down[i * of.hidden + j] * dy[i];
      d.down[i * of.hidden + j] = dy[i] * kept.h[j];
    }
    d.up_bias[j] = dh * (1 - kept.h[j] * kept.h[j]);
    for (size_t i = 0; i < kWidth; ++i) {
      d.up[j * kWidth + i] = d.up_bias[j] * kept.z[i];
      dz[i] += of.up[j * kWidth + i] * d.up_bias[j];
    }
  }
  sum_over_tensor(dz);
  for (size_t i = 0; i < kWidth; ++i) {
    d.gain[i] = dz[i] * kept.x[i];
    d.x[i] = dz[i] * of.gain[i];
  }
  return d;
}

}  // namespace ebb::testing
