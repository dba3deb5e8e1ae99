// The smallest trainer: a perceptron learns a sine on two ranks, with all state in shards (ZeRO-3).
//
//   build/release/bin/minimal       prints the loss of every 100th step
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"

constexpr int kBatch = 32;
constexpr char kConfig[] = R"({"train_micro_batch_size_per_gpu": 32,
  "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}})";
struct Layer {
  int in, out;
  ebb::UnitId unit;
  ebb::ParameterId w, b;
  std::vector<float> x = std::vector<float>(kBatch * in), dx = {};
};

absl::Status Train(ebb::World world) {
  ebb::ModelSpec model;
  model.compute_dtypes = model.gradient_dtypes = {ebb::DType::kFloat32};  // of the kernels below
  std::vector<Layer> net;
  for (auto [in, out] : {std::pair{16, 64}, {64, 64}, {64, 1}}) {
    const ebb::UnitId unit = model.AddUnit(absl::StrCat("layer", net.size()));
    const auto normal = ebb::Normal(std::sqrt(2.0f / static_cast<float>(in)), /*seed=*/1);
    model.forward.push_back({unit});
    net.push_back({in, out, unit,
                   model.Add(unit, {absl::StrCat("w", net.size()), {out, in}, normal}),
                   model.Add(unit, {absl::StrCat("b", net.size()), {out}, ebb::Constant(0)})});
  }
  const auto config = ebb::Config::FromJson(kConfig);
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(), std::move(model), *config);
  if (!engine.ok()) return engine.status();
  std::mt19937 random(static_cast<unsigned>(world.rank()));  // each rank draws its own samples
  std::vector<float> y(kBatch), dy(kBatch);
  for (int n = 1; n <= 500; ++n) {
    for (float& v : net[0].x) v = std::normal_distribution<float>()(random);
    ebb::Step step = engine->BeginStep();
    for (size_t i = 0; i < net.size(); ++i) {
      ebb::ForwardScope unit = step.Forward(net[i].unit);  // the parameters are here ...
      const auto w = unit.parameter(net[i].w).as<float>();
      const auto bias = unit.parameter(net[i].b).as<float>();
      for (int at = 0, in = net[i].in; at < kBatch * net[i].out; ++at) {
        const int b = at / net[i].out, o = at % net[i].out;
        float sum = bias[o];
        for (int k = 0; k < in; ++k) sum += w[o * in + k] * net[i].x[b * in + k];
        (i < 2 ? net[i + 1].x : y)[at] = i < 2 ? std::max(sum, 0.0f) : sum;
      }
    }  // ... and gone here
    float loss = 0;
    for (int b = 0; b < kBatch; ++b) dy[b] = 2 * (y[b] - std::sin(net[0].x[b * 16])) / kBatch;
    for (float d : dy) loss += d * d * kBatch / 4;
    step.AddLoss({.data = &loss});
    for (size_t i = net.size(); i-- > 0;) {
      ebb::BackwardScope unit = step.Backward(net[i].unit);
      const auto w = unit.parameter(net[i].w).as<float>();
      auto dw = unit.gradient(net[i].w).as<float>(), db = unit.gradient(net[i].b).as<float>();
      net[i].dx.assign(net[i].x.size(), 0);
      for (int at = 0, in = net[i].in; at < kBatch * net[i].out; ++at) {
        const int b = at / net[i].out, o = at % net[i].out;
        const float d = i == 2 ? dy[at] : net[i + 1].x[at] > 0 ? net[i + 1].dx[at] : 0;
        db[o] += d;
        for (int k = 0; k < in; ++k) dw[o * in + k] += d * net[i].x[b * in + k];
        for (int k = 0; k < in; ++k) net[i].dx[b * in + k] += d * w[o * in + k];
      }
    }  // the gradients are on their way
    if (absl::Status status = step.Finish(); !status.ok()) return status;
    const auto report = engine->Report();
    if (!report.ok()) return report.status();
    if (world.rank() == 0 && n % 100 == 0) std::printf("step %d  loss %.4f\n", n, report->loss);
  }
  return absl::OkStatus();
}

int main() {
  const absl::Status status = ebb::RunThreads(/*ranks=*/2, Train);
  return status.ok() ? 0 : (std::fprintf(stderr, "%s\n", status.ToString().c_str()), 1);
}
