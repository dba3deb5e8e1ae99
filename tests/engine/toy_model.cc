#include "tests/engine/toy_model.h"

#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace ebb::testing {

ToyModel::ToyModel(ToyOptions options) : options_(options) {
  const int64_t n = options.width;
  for (int l = 0; l < options.layers; ++l) {
    const UnitId unit = spec_.AddUnit(absl::StrCat("layer", l));
    Layer layer;
    // Another height for each layer would break the chain; another number of parameters per unit
    // keeps sizes odd.
    layer.weight = spec_.Add(
        unit, {.name = absl::StrCat("w", l), .shape = {n, n}, .init = Normal(0.3f, options.seed)});
    if (l % 2 == 0)
      layer.bias =
          spec_.Add(unit, {.name = absl::StrCat("b", l), .shape = {n}, .init = Constant(0.01f)});
    if (l % 2 == 1) layer.bias = ParameterId{-1};
    if (options.frozen && l % 3 != 2) {
      layer.has_scale = true;
      layer.scale = spec_.Add(
          unit,
          {.name = absl::StrCat("s", l), .shape = {n}, .init = Constant(1.5f), .trainable = false});
    }
    layers_.push_back(layer);
  }
  for (int l = 0; l < options.layers; ++l) spec_.forward.push_back({.unit = UnitId{l}});
  if (options.tied) spec_.forward.push_back({.unit = UnitId{0}});
  if (options.boundaries) {
    for (size_t v = 0; v + 1 < spec_.forward.size(); ++v) spec_.forward[v].output_bytes = n * 4;
  }
}

std::vector<float> Values(const TensorView& view) {
  std::vector<float> values;
  for (float value : view.as<float>()) values.push_back(value);
  for (BFloat16 value : view.as<BFloat16>()) values.push_back(static_cast<float>(value));
  for (Float16 value : view.as<Float16>()) values.push_back(static_cast<float>(value));
  return values;
}

void AddTo(const MutableTensorView& view, std::span<const float> values) {
  const auto add = [&](auto elements) {
    using T = typename decltype(elements)::value_type;
    for (size_t i = 0; i < elements.size(); ++i)
      elements[i] = T(static_cast<float>(elements[i]) + values[i]);
  };
  add(view.as<float>());
  add(view.as<BFloat16>());
  add(view.as<Float16>());
}

std::vector<float>& ToyModel::Activation(int micro_batch, int visit) {
  if (kept_.size() <= static_cast<size_t>(micro_batch))
    kept_.resize(static_cast<size_t>(micro_batch) + 1);
  if (flow_.size() < kept_.size()) flow_.resize(kept_.size());
  auto& boundaries = kept_[static_cast<size_t>(micro_batch)];
  boundaries.resize(spec_.forward.size() + 1);
  auto& values = boundaries[static_cast<size_t>(visit)];
  values.resize(static_cast<size_t>(options_.width));
  return values;
}

void ToyModel::Input(int rank, int64_t step, int micro_batch, std::span<float> x) const {
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(0.37f * static_cast<float>(i + 1) + 1.3f * static_cast<float>(rank) +
                    0.11f * static_cast<float>(step) + 2.1f * static_cast<float>(micro_batch));
  }
}

void ToyModel::Compute(const Scope& scope, int visit, std::span<const float> x,
                       std::span<float> y) const {
  const Layer& layer = layers_[static_cast<size_t>(spec_.forward[static_cast<size_t>(visit)].unit)];
  const size_t n = x.size();
  const std::vector<float> w = Values(scope.parameter(layer.weight));
  const std::vector<float> b =
      layer.bias == ParameterId{-1} ? std::vector<float>(n) : Values(scope.parameter(layer.bias));
  const std::vector<float> s =
      layer.has_scale ? Values(scope.parameter(layer.scale)) : std::vector<float>(n, 1.0f);
  if (w.size() != n * n || b.size() != n || s.size() != n) return;
  for (size_t o = 0; o < n; ++o) {
    float sum = b[o];
    for (size_t k = 0; k < n; ++k) sum += w[o * n + k] * x[k];
    y[o] = s[o] * std::tanh(sum);
  }
}

void ToyModel::Forward(Step& step, int visit, int rank, int64_t number) {
  ForwardScope scope = step.Forward(unit(visit));
  for (int m : scope.micro_batches()) {
    std::vector<float>& x = Activation(m, visit);
    if (visit == 0) Input(rank, number, m, x);
    if (options_.boundaries && visit > 0) x = Values(scope.input(m));
    std::vector<float>& y = Activation(m, visit + 1);
    Compute(scope, visit, Activation(m, visit), y);
    const MutableTensorView out = scope.output(m);
    for (size_t i = 0; i < out.as<float>().size(); ++i) out.as<float>()[i] = y[i];
  }
}

void ToyModel::Backward(Step& step, int visit, int rank, int64_t number, bool blow_up) {
  BackwardScope scope = step.Backward(unit(visit));
  const Layer& layer = layers_[static_cast<size_t>(unit(visit))];
  const size_t n = static_cast<size_t>(options_.width);
  const std::vector<float> w = Values(scope.parameter(layer.weight));
  const std::vector<float> s =
      layer.has_scale ? Values(scope.parameter(layer.scale)) : std::vector<float>(n, 1.0f);
  if (w.size() != n * n || s.size() != n) return;
  for (int m : scope.micro_batches()) {
    std::vector<float> x = Activation(m, visit), y(n);
    Compute(scope, visit, x, y);
    std::vector<float>& dy = flow_[static_cast<size_t>(m)];
    if (visit + 1 == visits()) {
      float loss = 0;
      dy.assign(n, 0);
      for (size_t o = 0; o < n; ++o) {
        const float target =
            std::cos(0.2f * static_cast<float>(o) + static_cast<float>(rank + number));
        loss += (y[o] - target) * (y[o] - target) / static_cast<float>(n);
        dy[o] = 2 * (y[o] - target) / static_cast<float>(n) * step.loss_scale();
        if (blow_up) dy[o] *= 1e38f;
      }
      step.AddLoss({.data = &loss});
    }
    if (options_.boundaries && visit + 1 < visits()) dy = Values(scope.output_gradient(m));
    std::vector<float> dx(n), dw(n * n), db(n);
    for (size_t o = 0; o < n; ++o) {
      const float t = y[o] / s[o];
      const float d = dy[o] * s[o] * (1 - t * t);
      db[o] = d;
      for (size_t k = 0; k < n; ++k) {
        dw[o * n + k] = d * x[k];
        dx[k] += d * w[o * n + k];
      }
    }
    AddTo(scope.gradient(layer.weight), dw);
    if (layer.bias != ParameterId{-1}) AddTo(scope.gradient(layer.bias), db);
    const MutableTensorView in = scope.input_gradient(m);
    for (size_t i = 0; i < in.as<float>().size(); ++i) in.as<float>()[i] = dx[i];
    dy = dx;
  }
}

absl::Status ToyModel::Train(Engine& engine, int rank, int64_t number, StepOptions options,
                             bool blow_up) {
  Step step = engine.BeginStep(options);
  for (int round = 0; round < step.rounds(); ++round) {
    for (int v = 0; v < visits(); ++v) Forward(step, v, rank, number);
    for (int v = visits() - 1; v >= 0; --v) Backward(step, v, rank, number, blow_up);
  }
  return step.Finish();
}

absl::StatusOr<double> ToyModel::Evaluate(Engine& engine, int rank, int micro_batches) {
  Evaluation evaluation = engine.BeginEvaluation(micro_batches);
  std::vector<std::vector<float>> flow(static_cast<size_t>(micro_batches),
                                       std::vector<float>(static_cast<size_t>(options_.width)));
  for (int v = 0; v < visits(); ++v) {
    ForwardScope scope = evaluation.Forward(unit(v));
    for (int m : scope.micro_batches()) {
      std::vector<float>& x = flow[static_cast<size_t>(m)];
      if (v == 0) Input(rank, /*step=*/-1, m, x);
      if (options_.boundaries && v > 0) x = Values(scope.input(m));
      std::vector<float> y(x.size());
      Compute(scope, v, x, y);
      const MutableTensorView out = scope.output(m);
      for (size_t i = 0; i < out.as<float>().size(); ++i) out.as<float>()[i] = y[i];
      x = y;
      if (v + 1 < visits()) continue;
      float loss = 0;
      for (float value : y) loss += value * value;
      evaluation.AddLoss({.data = &loss});
    }
  }
  return evaluation.Finish();
}

absl::StatusOr<std::vector<uint32_t>> MasterBits(Engine& engine, const ModelSpec& model) {
  std::vector<uint32_t> bits;
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    std::vector<float> whole(static_cast<size_t>(Elements(model.parameters[p].shape)));
    if (absl::Status status =
            engine.Gather(ParameterId{static_cast<int32_t>(p)}, StateClass::kMaster, whole);
        !status.ok()) {
      return status;
    }
    for (float value : whole) bits.push_back(std::bit_cast<uint32_t>(value));
  }
  return bits;
}

}  // namespace ebb::testing
