// A layer that two ranks share (tensor parallelism), saved, and loaded by ranks that have it whole.
// Run: build/release/bin/features.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "chain.h"

namespace {

constexpr int64_t kSide = 16, kHidden = 24;

struct Mlp {
  ebb::UnitId unit;
  ebb::ParameterId up, down;
};

Mlp AddMlp(ebb::ModelSpec& model) {
  const ebb::UnitId unit = model.AddUnit("mlp");
  model.forward.push_back({.unit = unit, .forward = false});
  return {.unit = unit,
          .up = model.Add(unit, {.name = "up",
                                 .shape = {kHidden, kSide},
                                 .init = ebb::Normal(0.2f, 1),
                                 .split = ebb::Split{.dimension = 0}}),  // column parallel
          .down = model.Add(unit, {.name = "down",
                                   .shape = {kSide, kHidden},
                                   .init = ebb::Normal(0.2f, 2),
                                   .split = ebb::Split{.dimension = 1}})};  // row parallel
}

// y = down tanh(up x), which learns y = 2 x. Each rank has some of the hidden numbers.
absl::Status TrainMlp(ebb::Engine& engine, const Mlp& mlp, const Sample& sample, float& loss) {
  ebb::Step step = engine.BeginStep({});
  {
    ebb::BackwardScope scope = step.Backward(mlp.unit);
    const std::span<const float> up = scope.parameter(mlp.up).as<float>(),
                                 down = scope.parameter(mlp.down).as<float>();
    const std::span<float> d_up = scope.gradient(mlp.up).as<float>(),
                           d_down = scope.gradient(mlp.down).as<float>();
    const size_t hidden = up.size() / kSide;
    std::vector<float> h(hidden), y(kSide, 0);
    for (size_t j = 0; j < hidden; ++j) {
      for (size_t k = 0; k < kSide; ++k) h[j] += up[j * kSide + k] * sample.input[k];
      h[j] = std::tanh(h[j]);
      for (size_t i = 0; i < kSide; ++i) y[i] += down[i * hidden + j] * h[j];
    }
    const int64_t shape[] = {kSide};
    engine.tensor().AllReduce({.data = y.data(), .shape = shape});
    loss = 0;
    for (size_t i = 0; i < kSide; ++i) {
      const float error = y[i] - sample.target[i], dy = 2 * error / kSide;
      loss += error * error / kSide;
      for (size_t j = 0; j < hidden; ++j) {
        d_down[i * hidden + j] = dy * h[j];
        for (size_t k = 0; k < kSide; ++k)
          d_up[j * kSide + k] += dy * down[i * hidden + j] * (1 - h[j] * h[j]) * sample.input[k];
      }
    }
    step.AddLoss({.data = &loss});
  }
  return step.Finish();
}

absl::Status Train(ebb::Engine& engine, const Mlp& mlp, const std::vector<Sample>& samples,
                   int steps, float& loss) {
  for (int n = 0; n < steps; ++n) {
    const size_t at = static_cast<size_t>(n * engine.data_ranks() + engine.data_rank());
    const absl::Status status = TrainMlp(engine, mlp, samples[at % samples.size()], loss);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TrainTensor(const ebb::World& world, const std::vector<Sample>& samples) {
  // The ranks of one sample are neighbours.
  const auto tensor = ebb::Config::FromJson(R"({
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "ebb": {"mesh": {"tensor": 2}},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})");
  const auto whole = ebb::Config::FromJson(R"({
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})");
  if (!tensor.ok() || !whole.ok()) return tensor.ok() ? whole.status() : tensor.status();
  const std::string folder =
      std::filesystem::temp_directory_path() / ("ebb-features-tensor-" + std::to_string(getpid()));
  float cut = 0, after = 0;
  {
    ebb::ModelSpec model;
    const Mlp mlp = AddMlp(model);
    auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(/*threads=*/1), std::move(model),
                                      *tensor, {.name = "tensor"});
    if (!engine.ok()) return engine.status();
    if (absl::Status status = Train(*engine, mlp, samples, 40, cut); !status.ok()) return status;
    if (auto saved = ebb::SaveCheckpoint(*engine, folder); !saved.ok()) return saved.status();
  }
  ebb::ModelSpec model;
  const Mlp mlp = AddMlp(model);
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(/*threads=*/1), std::move(model),
                                    *whole, {.name = "whole"});
  if (!engine.ok()) return engine.status();
  if (auto loaded = ebb::LoadCheckpoint(*engine, folder); !loaded.ok()) return loaded.status();
  if (absl::Status status = Train(*engine, mlp, samples, 40, after); !status.ok()) return status;
  if (world.rank() == 0) {
    std::filesystem::remove_all(folder);
    std::printf("tensor: loss %.4f on 2 tensor ranks, then %.4f without\n", cut, after);
  }
  return after < cut ? absl::OkStatus() : absl::InternalError("the model learns nothing");
}
