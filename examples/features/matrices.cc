// Muon, which makes updates of whole matrices orthogonal, and AdamW beside it. Run:
// build/release/bin/features.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "chain.h"

namespace {

constexpr int64_t kSide = 16;

struct Linear {
  ebb::UnitId unit;
  ebb::ParameterId weight, bias;
};

// y = w x + b, which learns y = 2 x. Rows of w are multiplied with the sample's first numbers.
absl::Status TrainLinear(ebb::Engine& engine, const Linear& layer, const Sample& sample,
                         float& loss) {
  ebb::Step step = engine.BeginStep({});
  {
    ebb::BackwardScope scope = step.Backward(layer.unit);
    const std::span<const float> w = scope.parameter(layer.weight).as<float>(),
                                 b = scope.parameter(layer.bias).as<float>();
    const std::span<float> dw = scope.gradient(layer.weight).as<float>(),
                           db = scope.gradient(layer.bias).as<float>();
    loss = 0;
    for (size_t row = 0; row < kSide; ++row) {
      float error = b[row] - sample.target[row];
      for (size_t k = 0; k < kSide; ++k) error += w[row * kSide + k] * sample.input[k];
      loss += error * error / kSide;
      db[row] = 2 * error / kSide;
      for (size_t k = 0; k < kSide; ++k) dw[row * kSide + k] = db[row] * sample.input[k];
    }
    step.AddLoss({.data = &loss});
  }
  return step.Finish();
}

}  // namespace

absl::Status TrainMatrices(const ebb::World& world, const std::vector<Sample>& samples) {
  ebb::ModelSpec model;
  const ebb::UnitId unit = model.AddUnit("linear");
  const Linear layer{
      .unit = unit,
      .weight = model.Add(
          unit, {.name = "weight", .shape = {kSide, kSide}, .init = ebb::Normal(0.02f, 1)}),
      .bias = model.Add(unit, {.name = "bias", .shape = {kSide}, .init = ebb::Constant(0)})};
  model.forward.push_back({.unit = unit, .forward = false});
  // The log says that Muon updates "weight" and AdamW "bias".
  const auto config = ebb::Config::FromJson(R"({
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Muon", "params": {"lr": 0.05, "adam_lr": 0.01}}})");
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(/*threads=*/1), std::move(model),
                                    *config, {.name = "matrices"});
  if (!engine.ok()) return engine.status();
  float first = 0, last = 0;
  for (int n = 0; n < 40; ++n) {
    absl::Status status =
        TrainLinear(*engine, layer, samples[static_cast<size_t>(n) % samples.size()], last);
    if (!status.ok()) return status;
    if (n == 0) first = last;
  }
  if (world.rank() == 0) std::printf("matrices: loss %.4f -> %.4f\n", first, last);
  return last < first / 2 ? absl::OkStatus() : absl::InternalError("Muon learns nothing");
}
