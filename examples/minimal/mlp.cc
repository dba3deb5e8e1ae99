// The smallest trainer: a perceptron of three layers learns a sine on two ranks, its parameters,
// gradients and optimizer states in shards (ZeRO stage 3).
#include <cmath>
#include <cstdio>
#include <random>

#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"

constexpr int kBatch = 32;
constexpr char kConfig[] = R"({"train_micro_batch_size_per_gpu": 32,
  "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}})";

struct Layer {
  int in, out;
  ebb::UnitId unit;
  ebb::ParameterId weight, bias;
  std::vector<float> x = std::vector<float>(kBatch * in), dx = x;
};

absl::Status Train(ebb::World world) {
  ebb::ModelSpec model;
  std::vector<Layer> net;
  for (auto [in, out] : {std::pair{16, 64}, {64, 64}, {64, 1}}) {
    const ebb::UnitId unit = model.AddUnit(absl::StrCat("layer", net.size()));
    const auto random = ebb::Normal(std::sqrt(2.0f / static_cast<float>(in)), /*seed=*/1);
    const auto w = model.Add(unit, {absl::StrCat("w", net.size()), {out, in}, random});
    const auto b = model.Add(unit, {absl::StrCat("b", net.size()), {out}, ebb::Constant(0)});
    model.forward.push_back({unit});
    net.push_back({in, out, unit, w, b});
  }
  auto config = ebb::Config::FromJson(kConfig);
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(), std::move(model), *config);
  if (!engine.ok()) return engine.status();

  std::mt19937 random(static_cast<unsigned>(world.rank()));  // each rank draws its own samples
  std::normal_distribution<float> normal;
  std::vector<float> y(kBatch), dy(kBatch);
  for (int n = 1; n <= 500; ++n) {
    for (float& v : net[0].x) v = normal(random);
    ebb::Step step = engine->BeginStep();
    for (size_t i = 0; i < net.size(); ++i) {
      ebb::ForwardScope unit = step.Forward(net[i].unit);  // the parameters are here ...
      const auto [in, out] = std::pair{net[i].in, net[i].out};
      const auto w = unit.parameter(net[i].weight).as<float>();
      const auto bias = unit.parameter(net[i].bias).as<float>();
      for (int b = 0; b < kBatch; ++b)
        for (int o = 0; o < out; ++o) {
          float sum = bias[o];
          for (int k = 0; k < in; ++k) sum += w[o * in + k] * net[i].x[b * in + k];
          (i + 1 < net.size() ? net[i + 1].x : y)[b * out + o] = i < 2 ? std::max(sum, 0.0f) : sum;
        }
    }  // ... and gone here
    float loss = 0;
    for (int b = 0; b < kBatch; ++b) {
      const float error = y[b] - std::sin(net[0].x[b * 16]);
      dy[b] = 2 * error / kBatch, loss += error * error / kBatch;
    }
    step.AddLoss({.data = &loss});
    for (size_t i = net.size(); i-- > 0;) {
      ebb::BackwardScope unit = step.Backward(net[i].unit);
      const auto [in, out] = std::pair{net[i].in, net[i].out};
      const auto w = unit.parameter(net[i].weight).as<float>();
      auto dw = unit.gradient(net[i].weight).as<float>(),
           db = unit.gradient(net[i].bias).as<float>();
      std::fill(net[i].dx.begin(), net[i].dx.end(), 0.0f);
      for (int at = 0; at < kBatch * out; ++at) {
        const int b = at / out, o = at % out;
        const float d = i == 2 ? dy[at] : net[i + 1].x[at] > 0 ? net[i + 1].dx[at] : 0;
        db[o] += d;
        for (int k = 0; k < in; ++k) {
          dw[o * in + k] += d * net[i].x[b * in + k];
          net[i].dx[b * in + k] += d * w[o * in + k];
        }
      }
    }  // the gradients are on their way to the ranks that own them
    if (absl::Status status = step.Finish(); !status.ok()) return status;
    auto report = engine->Report();
    if (!report.ok()) return report.status();
    if (world.rank() == 0 && n % 100 == 0) std::printf("step %d  loss %.4f\n", n, report->loss);
  }
  return absl::OkStatus();
}

int main() {
  const absl::Status status = ebb::RunThreads(/*ranks=*/2, Train);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
