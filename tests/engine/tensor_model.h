// A whole model of tensor_block.h, which the engine cuts over tensor ranks (ParameterSpec::split), and
// its trainer. The hidden elements do not divide by the tensor ranks. Each tensor rank has the
// gradient of some elements of `down_bias` only, as under sequence parallelism.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/tensor_block.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {

inline constexpr int kHidden = 7;

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
  void Walk(Step& step, int64_t number, const Fault& fault) {
    for (int m = 0; m < step.rounds(); ++m) {
      Vector x = TensorInput(number, engine_.data_rank() + m), dy;
      std::vector<TensorKept> kept(kBlocks);
      const auto sum = [this](Vector& values) { Sum(values); };
      for (int b = 0; b < kBlocks; ++b)
        x = BlockForward(ValuesOf(step.Forward(UnitId{b}), b), x, sum, kept[b]);
      step.AddLoss(reach_.Scalar(TensorLoss(x, step.loss_scale(), dy)));
      for (int b = kBlocks; b-- > 0;) {
        BackwardScope scope = step.Backward(UnitId{b});
        const TensorGradients d = BlockBackward(ValuesOf(scope, b), kept[b], dy, sum);
        Vector d_down_bias(kWidth);
        for (size_t i = 0; i < kWidth; ++i)
          if (static_cast<int>(i) % tensor_.size() == tensor_.rank()) d_down_bias[i] = dy[i];
        const Vector* const gradients[kRoles] = {&d.up, &d.up_bias, &d.down, &d.gain, &d_down_bias};
        for (int role = 0; role < kRoles; ++role)
          reach_.AddTo(scope.gradient(Of(b, static_cast<TensorRole>(role))), *gradients[role]);
        if (fault != nullptr && b == 0) fault(scope);
        dy = d.x;
      }
    }
  }

  TensorBlock ValuesOf(const Scope& scope, int b) const {
    const auto values = [&](TensorRole role) {
      return reach_.Values(scope.parameter(Of(b, role)));
    };
    Vector bias = values(kUpBias);
    return {.hidden = bias.size(),
            .up = values(kUp),
            .up_bias = bias,
            .down = values(kDown),
            .gain = values(kGain),
            .down_bias = values(kDownBias)};
  }
  void Sum(Vector& values) const {
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
