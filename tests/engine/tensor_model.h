// A whole model that the engine cuts over tensor ranks (ParameterSpec::split), and its trainer. A
// block has a column-parallel and a row-parallel product:
//
//   y = sum over tensor ranks of down tanh(up (gain x) + up_bias)  +  down_bias
//
// The hidden elements do not divide by the tensor ranks. `gain` is whole. So is `down_bias`, of
// which each tensor rank has the gradient of some elements only, as under sequence parallelism.
#pragma once

#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {

using Vector = std::vector<float>;

inline constexpr int kBlocks = 2, kWidth = 6, kHidden = 7;
enum TensorRole { kUp, kUpBias, kDown, kGain, kDownBias, kRoles };
inline ParameterId Of(int block, TensorRole role) {
  return static_cast<ParameterId>(block * kRoles + role);
}

inline ModelSpec TensorModel(bool splits = true) {
  ModelSpec model;
  for (int b = 0; b < kBlocks; ++b) {
    const UnitId unit = model.AddUnit(absl::StrCat("block", b));
    const auto add = [&](const char* name, std::vector<int64_t> shape,
                         std::optional<Split> split = {}, bool sums_gradient = false) {
      if (!splits) split = {};
      model.Add(unit, {.name = absl::StrCat("block", b, ".", name),
                       .shape = std::move(shape),
                       .init = Normal(0.5f, 3),
                       .split = std::move(split),
                       .sums_gradient = sums_gradient && splits});
    };
    add("up", {kHidden, kWidth}, Split{.dimension = 0});
    add("up_bias", {kHidden}, Split{.dimension = 0});
    add("down", {kWidth, kHidden}, Split{.dimension = 1});
    add("gain", {kWidth});
    add("down_bias", {kWidth}, {}, /*sums_gradient=*/true);
    model.forward.push_back({.unit = unit});
  }
  return model;
}

class TensorTrainer {
 public:
  // One rank does this in the first block's backward of a step, beside what all do.
  using Fault = std::function<void(BackwardScope& scope)>;

  explicit TensorTrainer(Engine& engine) : engine_(engine), tensor_(engine.tensor()) {}

  // A sample, and what the model learns to make of it.
  static Vector Input(int64_t number, int sample) {
    Vector x(kWidth);
    for (size_t i = 0; i < kWidth; ++i)
      x[i] = std::cos(static_cast<float>(i) * 1.7f + static_cast<float>(number) +
                      5 * static_cast<float>(sample));
    return x;
  }
  static float Target(size_t i) { return 0.3f * static_cast<float>(i); }

  absl::Status Train(int64_t number, const Fault& fault = nullptr) {
    Step step = engine_.BeginStep();
    Walk(step, number, fault);
    return step.Finish();
  }
  // A step's gradients, whole, by parameter.
  absl::StatusOr<std::vector<Vector>> Gradients(int64_t number) {
    Step step = engine_.BeginStep({.hold_updates = true});
    Walk(step, number, nullptr);
    EBB_RETURN_IF_ERROR(step.Reduce());
    std::vector<Vector> all;
    for (size_t p = 0; p < engine_.model().parameters.size(); ++p) {
      const ParameterSpec& parameter = engine_.model().parameters[p];
      Vector& whole = all.emplace_back(static_cast<size_t>(Elements(WholeShape(parameter))));
      EBB_RETURN_IF_ERROR(
          engine_.Gather(static_cast<ParameterId>(p), StateClass::kGradient, whole));
    }
    EBB_RETURN_IF_ERROR(step.Finish());
    return all;
  }

 private:
  struct Kept {
    Vector x, z, h;
  };

  void Walk(Step& step, int64_t number, const Fault& fault) {
    for (int m = 0; m < step.rounds(); ++m) {
      Vector x = Input(number, engine_.data_rank() + m);
      std::vector<Kept> kept(kBlocks);
      for (int b = 0; b < kBlocks; ++b) x = Forward(step.Forward(UnitId{b}), b, x, kept[b]);
      float loss = 0;
      Vector dy(kWidth);
      for (size_t i = 0; i < kWidth; ++i) {
        const float error = x[i] - Target(i);
        loss += error * error / 2;
        dy[i] = error * step.loss_scale();
      }
      step.AddLoss(reach_.Scalar(loss));
      for (int b = kBlocks; b-- > 0;)
        dy = Backward(step.Backward(UnitId{b}), b, kept[b], dy, b == 0 ? fault : nullptr);
    }
  }

  Vector Forward(const Scope& scope, int b, const Vector& x, Kept& kept) {
    const Vector up = Values(scope, b, kUp), bias = Values(scope, b, kUpBias),
                 down = Values(scope, b, kDown), gain = Values(scope, b, kGain);
    const size_t hidden = bias.size();
    kept = {x, x, Vector(hidden)};
    for (size_t i = 0; i < kWidth; ++i) kept.z[i] = gain[i] * x[i];
    Vector y(kWidth);
    for (size_t j = 0; j < hidden; ++j) {
      float sum = bias[j];
      for (size_t i = 0; i < kWidth; ++i) sum += up[j * kWidth + i] * kept.z[i];
      kept.h[j] = std::tanh(sum);
      for (size_t i = 0; i < kWidth; ++i) y[i] += down[i * hidden + j] * kept.h[j];
    }
    Sum(y);
    const Vector whole_bias = Values(scope, b, kDownBias);
    for (size_t i = 0; i < kWidth; ++i) y[i] += whole_bias[i];
    return y;
  }

  Vector Backward(BackwardScope scope, int b, const Kept& kept, const Vector& dy,
                  const Fault& fault) {
    const Vector up = Values(scope, b, kUp), down = Values(scope, b, kDown),
                 gain = Values(scope, b, kGain);
    const size_t hidden = kept.h.size();
    Vector d_up(hidden * kWidth), d_bias(hidden), d_down(kWidth * hidden), dz(kWidth);
    for (size_t j = 0; j < hidden; ++j) {
      float dh = 0;
      for (size_t i = 0; i < kWidth; ++i) {
        dh += down[i * hidden + j] * dy[i];
        d_down[i * hidden + j] = dy[i] * kept.h[j];
      }
      d_bias[j] = dh * (1 - kept.h[j] * kept.h[j]);
      for (size_t i = 0; i < kWidth; ++i) {
        d_up[j * kWidth + i] = d_bias[j] * kept.z[i];
        dz[i] += up[j * kWidth + i] * d_bias[j];
      }
    }
    Sum(dz);
    Vector d_gain(kWidth), dx(kWidth), d_down_bias(kWidth);
    for (size_t i = 0; i < kWidth; ++i) {
      d_gain[i] = dz[i] * kept.x[i];
      dx[i] = dz[i] * gain[i];
      if (static_cast<int>(i) % tensor_.size() == tensor_.rank()) d_down_bias[i] = dy[i];
    }
    const Vector* const gradients[kRoles] = {&d_up, &d_bias, &d_down, &d_gain, &d_down_bias};
    for (int role = 0; role < kRoles; ++role)
      reach_.AddTo(scope.gradient(Of(b, static_cast<TensorRole>(role))), *gradients[role]);
    if (fault != nullptr) fault(scope);
    return dx;
  }

  Vector Values(const Scope& scope, int b, TensorRole role) const {
    return reach_.Values(scope.parameter(Of(b, role)));
  }
  void Sum(Vector& values) {
    const int64_t shape[] = {std::ssize(values)};
    tensor_.AllReduce({.data = values.data(), .shape = shape});
  }

  Engine& engine_;
  const TensorAxis tensor_;
  const Reach reach_{Device::Cpu(1)};
};

inline Config TensorConfig(int stage, int tensor) {
  Config config;
  config.compute = DType::kFloat32;
  config.micro_batch_size = 1;
  config.gradient_clipping = 0.1;
  config.optimizer.type = OptimizerType::kAdamW;
  config.optimizer.learning_rate = 0.01;
  config.zero.stage = stage;
  config.zero.param_persistence_threshold = 0;
  config.ebb.mesh.tensor = tensor;
  config.ebb.timeout_seconds = 120;
  return config;
}

}  // namespace ebb::testing
