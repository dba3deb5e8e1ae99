// Scopes that differ from the order of ModelSpec::forward: one is left out, some are open together,
// some are computed again. Run: build/release/bin/features.
#include <string>
#include <utility>

#include "chain.h"

// An error, unless the step was begun with may_leave_out.
absl::Status TrainOneLayerOfTwo(const ebb::World& world) {
  ebb::ModelSpec model;
  const std::vector<Layer> chain = Declare(model, /*depth=*/2);
  for (ebb::Visit& visit : model.forward) visit.output_bytes = 0;  // activations are the trainer's
  const auto config = ebb::Config::FromJson(R"({"train_micro_batch_size_per_gpu": 1})");
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(1), std::move(model), *config);
  if (!engine.ok()) return engine.status();
  for (const bool meant : {false, true}) {
    ebb::Step step = engine->BeginStep({.may_leave_out = meant});
    {
      ebb::BackwardScope scope = step.Backward(chain[1].unit);
      for (float& dw : scope.gradient(chain[1].weight).as<float>()) dw = 1;
    }
    if (step.Finish().ok() != meant) return absl::InternalError("layer0 was left out");
  }
  return absl::OkStatus();
}

namespace {

// A root module that stays open over its layers.
void DeclareRoot(ebb::ModelSpec& model) {  // F0( F1 F2 F0)  B0( B2 B1 B0)
  const int visits = static_cast<int>(model.forward.size());
  for (const bool backward : {false, true}) {
    model.order.push_back({.backward = backward, .visit = 0});  // opens
    for (int i = 1; i < visits; ++i)
      model.AddScope({.backward = backward, .visit = backward ? visits - i : i});
    model.order.push_back({.opens = false, .backward = backward, .visit = 0});
  }
}

}  // namespace

absl::Status TrainUnderARoot(const ebb::World& world, const std::vector<float>& sample) {
  ebb::ModelSpec model;
  const std::vector<Layer> chain = Declare(model, /*depth=*/3);
  for (ebb::Visit& visit : model.forward) visit.output_bytes = 0;  // activations are the trainer's
  DeclareRoot(model);
  const auto config = ebb::Config::FromJson(R"({"train_micro_batch_size_per_gpu": 1})");
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(1), std::move(model), *config);
  if (!engine.ok()) return engine.status();

  ebb::Step step = engine->BeginStep();
  std::vector<std::vector<float>> x(4,
                                    sample);  // the input of each layer, and the output of the last
  {
    const ebb::ForwardScope root = step.Forward(chain[0].unit);
    Multiply(root.parameter(chain[0].weight).as<float>(), sample, x[1]);
    for (size_t i : {1, 2}) {
      const ebb::ForwardScope scope = step.Forward(chain[i].unit);
      Multiply(scope.parameter(chain[i].weight).as<float>(), x[i], x[i + 1]);
    }
  }
  ebb::BackwardScope root = step.Backward(chain[0].unit);
  for (size_t i : {2, 1}) {
    ebb::BackwardScope scope = step.Backward(chain[i].unit);
    AddProducts(scope, chain[i].weight, x[3], x[i]);
    Multiply(scope.parameter(chain[i].weight).as<float>(), x[3], x[3]);
  }
  AddProducts(root, chain[0].weight, x[3], x[0]);  // reduced when it closes, behind its children
  root.Close();
  return step.Finish();
}

namespace {

// Segments of two layers: forward keeps what goes into a segment, backward computes both layers
// again.
void DeclareSegments(ebb::ModelSpec& model) {  // F0 F1 F2 F3  R2 R3 B3 B2  R0 R1 B1 B0
  const int visits = static_cast<int>(model.forward.size());
  for (int v = 0; v < visits; ++v) model.AddScope({.visit = v});
  for (int end = visits; end > 0; end -= 2) {
    for (int v : {end - 2, end - 1}) model.AddScope({.recompute = true, .visit = v});
    for (int v : {end - 1, end - 2}) model.AddScope({.backward = true, .visit = v});
  }
}

}  // namespace

absl::Status TrainInSegments(const ebb::World& world, const std::vector<float>& sample) {
  ebb::ModelSpec model;
  const std::vector<Layer> chain = Declare(model, /*depth=*/4);
  DeclareSegments(model);
  const auto config = ebb::Config::FromJson(R"({"train_micro_batch_size_per_gpu": 1})");
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(1), std::move(model), *config);
  if (!engine.ok()) return engine.status();

  const auto input = [&](const ebb::Scope& scope, size_t i) {
    return i == 0 ? std::span<const float>(sample) : scope.input(0).as<float>();
  };
  std::vector<float> y(kWidth);
  const auto compute = [&](ebb::ForwardScope scope, size_t i) {
    Multiply(scope.parameter(chain[i].weight).as<float>(), input(scope, i),
             i == 3 ? std::span<float>(y) : scope.output(0).as<float>());
  };
  ebb::Step step = engine->BeginStep();
  for (size_t i = 0; i < 4; ++i) compute(step.Forward(chain[i].unit), i);
  for (size_t i = 4; i-- > 0;) {
    if (i % 2 == 1)
      for (size_t again : {i - 1, i}) compute(step.Recompute(chain[again].unit), again);
    ebb::BackwardScope scope = step.Backward(chain[i].unit);
    const std::span<const float> dy =
        i == 3 ? std::span<const float>(y) : scope.output_gradient(0).as<float>();
    AddProducts(scope, chain[i].weight, dy, input(scope, i));
    if (i > 0)
      Multiply(scope.parameter(chain[i].weight).as<float>(), dy,
               scope.input_gradient(0).as<float>());
  }
  return step.Finish();
}

// Another order for an engine that has trained.
absl::Status GoOnUnderARoot(ebb::Engine& engine) {
  ebb::ModelSpec model = engine.model();
  for (ebb::Visit& visit : model.forward) visit.output_bytes = 0;
  DeclareRoot(model);
  return engine.Reorder(std::move(model.forward), std::move(model.order));
}
