// A chain of layers: kernels, initial values, a step in any order of its micro-batches, an
// evaluation. Run: build/release/bin/features.
#include "chain.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

void Multiply(std::span<const float> w, std::span<const float> x, std::span<float> y) {
  for (size_t i = 0; i < y.size(); ++i) y[i] = w[i] * x[i];
}

// Gradients are fp32, bf16 or fp16, as the configuration says: WithNumbers instantiates the kernel
// for each.
void AddProducts(ebb::BackwardScope& scope, ebb::ParameterId weight, std::span<const float> dy,
                 std::span<const float> x) {
  const ebb::BackwardScope::Fused gradient = scope.fused_gradient(weight);
  ebb::WithNumbers(gradient.tensor, [&](auto dw) {  // a span of float, BFloat16 or Float16
    using Number = typename decltype(dw)::value_type;
    for (size_t i = 0; i < dw.size(); ++i) {
      const float before = gradient.beta == 0 ? 0 : gradient.beta * static_cast<float>(dw[i]);
      dw[i] = Number(before + dy[i] * x[i]);
    }
  });
}

namespace {

// Initial values are a function of the name and the index alone, so that any number of ranks has
// the same model.
absl::Status NearOne(const ebb::Slice& slice, std::span<float> values) {
  if (!slice.name.starts_with("w"))
    return absl::NotFoundError(absl::StrCat("no rule for parameter ", slice.name));
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t index = slice.begin + static_cast<int64_t>(i);  // of the flattened parameter
    values[i] = 1 + 0.001f * static_cast<float>(index % 7);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<Layer> Declare(ebb::ModelSpec& model, int depth) {
  model.compute_dtypes = {ebb::DType::kFloat32};  // gradients: any, so they are not stated
  std::vector<Layer> chain;
  for (int i = 0; i < depth; ++i) {
    const ebb::UnitId unit = model.AddUnit(absl::StrCat("layer", i));
    chain.push_back(
        {.unit = unit,
         .weight =
             model.Add(unit, {.name = absl::StrCat("w", i), .shape = {kWidth}, .init = NearOne})});
    const bool last = i + 1 == depth;
    model.forward.push_back({.unit = unit, .output_bytes = last ? 0 : kWidth * 4});
  }
  return chain;
}

// Loops over rounds and micro_batches() serve each order that ebb.micro_batches_per_round may ask
// for.
void WalkThrough(ebb::Step& step, const std::vector<Layer>& chain,
                 const std::vector<Sample>& samples) {
  const size_t last = chain.size() - 1;
  for (int round = 0; round < step.rounds(); ++round) {
    for (size_t i = 0; i < last; ++i) {
      ebb::ForwardScope scope = step.Forward(chain[i].unit);
      for (int m : scope.micro_batches()) {
        const std::span<const float> x =
            i == 0 ? std::span<const float>(samples[m].input) : scope.input(m).as<float>();
        Multiply(scope.parameter(chain[i].weight).as<float>(), x, scope.output(m).as<float>());
      }
    }
    for (size_t i = chain.size(); i-- > 0;) {
      ebb::BackwardScope scope = step.Backward(chain[i].unit);
      const std::span<const float> w = scope.parameter(chain[i].weight).as<float>();
      for (int m : scope.micro_batches()) {
        const std::span<const float> x =
            i == 0 ? std::span<const float>(samples[m].input) : scope.input(m).as<float>();
        std::vector<float> loss_gradient(kWidth);
        std::span<const float> dy = loss_gradient;
        if (i == last) {
          float loss = 0;
          for (size_t j = 0; j < dy.size(); ++j) {
            const float error = w[j] * x[j] - samples[m].target[j];
            loss += error * error / kWidth;
            loss_gradient[j] = 2 * error / kWidth;
          }
          step.AddLoss({.data = &loss});
        } else {
          dy = scope.output_gradient(m).as<float>();
        }
        AddProducts(scope, chain[i].weight, dy, x);
        if (i > 0) Multiply(w, dy, scope.input_gradient(m).as<float>());
      }
    }
  }
}

absl::Status TrainStep(ebb::Engine& engine, const std::vector<Layer>& chain,
                       const std::vector<Sample>& samples) {
  ebb::Step step = engine.BeginStep({.micro_batches = static_cast<int>(samples.size())});
  WalkThrough(step, chain, samples);
  return step.Finish();
}

absl::StatusOr<Evaluated> Evaluate(ebb::Engine& engine, const std::vector<Layer>& chain,
                                   const std::vector<Sample>& samples) {
  constexpr int kRight = 1;  // sum 0 is the loss
  ebb::Evaluation evaluation = engine.BeginEvaluation(static_cast<int>(samples.size()));
  for (size_t i = 0; i < chain.size(); ++i) {
    ebb::ForwardScope scope = evaluation.Forward(chain[i].unit);
    const std::span<const float> w = scope.parameter(chain[i].weight).as<float>();
    for (int m : scope.micro_batches()) {
      const std::span<const float> x =
          i == 0 ? std::span<const float>(samples[m].input) : scope.input(m).as<float>();
      if (i + 1 < chain.size()) {
        Multiply(w, x, scope.output(m).as<float>());
        continue;
      }
      float loss = 0, right = 0;
      for (size_t j = 0; j < w.size(); ++j) {
        const float error = w[j] * x[j] - samples[m].target[j];
        loss += error * error / kWidth;
        right += std::abs(error) < 0.1f ? 1.0f / kWidth : 0;
      }
      evaluation.AddLoss({.data = &loss});
      evaluation.Add(kRight, {.data = &right});
    }
  }
  const auto sums = evaluation.FinishSums();  // or Finish(), for the mean of the loss alone
  if (!sums.ok()) return sums.status();
  return Evaluated{.loss = (*sums)[0].mean(), .right = (*sums)[kRight].mean()};
}

// One code for all gradients. Here each round reduces them, and they have the dtype in which they
// are sent.
absl::Status TrainWithGradientsOf(const std::string& dtype, const ebb::World& world,
                                  const std::vector<Sample>& samples) {
  ebb::ModelSpec model;
  const std::vector<Layer> chain = Declare(model, /*depth=*/2);
  const auto config = ebb::Config::FromJson(absl::StrCat(
      R"({"train_micro_batch_size_per_gpu": 1, "communication_data_type": ")", dtype, R"(",
          "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": )",
      samples.size(), "}"));
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(1), std::move(model), *config);
  return engine.ok() ? TrainStep(*engine, chain, samples) : engine.status();
}

// The error of a step drops that step. The engine goes on with the next one.
absl::Status SurviveAMistake(ebb::Engine& engine, const std::vector<Layer>& chain) {
  ebb::Step step = engine.BeginStep();
  {
    ebb::ForwardScope scope = step.Forward(chain[0].unit);
    if (scope.parameter(chain[1].weight).size() != 0)  // of another unit: one line in the log
      return absl::InternalError("another unit's parameter is there");
  }
  if (step.Finish().ok()) return absl::InternalError("the mistake went unnoticed");
  return absl::OkStatus();  // the step was dropped, and the engine is as it was before it
}
