// A small model with everything that matters to the engine, and kernels that are plain loops: mixed
// and frozen sections, odd sizes, a unit visited twice, losses that depend on rank, step and
// micro-batch. Gradients are those of a chain y = tanh(w . x + b), so every parameter matters to
// every later one.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "ebb/ebb.h"

namespace ebb::testing {

struct ToyOptions {
  int layers = 4;
  int width = 13;
  bool tied = true;         // the first unit is visited again at the end
  bool frozen = true;       // each layer carries a frozen parameter
  bool boundaries = false;  // activations between visits belong to the engine
  uint64_t seed = 1;
};

class ToyModel {
 public:
  explicit ToyModel(ToyOptions options);

  const ModelSpec& spec() const { return spec_; }
  int visits() const { return static_cast<int>(spec_.forward.size()); }

  // One whole step. `blow_up`: this rank's gradients overflow.
  absl::Status Train(Engine& engine, int rank, int64_t step, StepOptions options = {},
                     bool blow_up = false);
  // Scopes of the step only, so that a test may leave the declared order.
  void Forward(Step& step, int visit, int rank, int64_t number);
  void Backward(Step& step, int visit, int rank, int64_t number, bool blow_up = false);
  absl::StatusOr<double> Evaluate(Engine& engine, int rank, int micro_batches = 1);

  UnitId unit(int visit) const { return spec_.forward[static_cast<size_t>(visit)].unit; }

 private:
  struct Layer {
    ParameterId weight{}, bias{}, scale{};
    bool has_scale = false;
  };
  std::vector<float>& Activation(int micro_batch, int visit);
  void Compute(const Scope& scope, int visit, std::span<const float> x, std::span<float> y) const;
  void Input(int rank, int64_t step, int micro_batch, std::span<float> x) const;

  ToyOptions options_;
  ModelSpec spec_;
  std::vector<Layer> layers_;                          // by unit
  std::vector<std::vector<std::vector<float>>> kept_;  // [micro-batch][boundary]
  std::vector<std::vector<float>> flow_;               // gradient, by micro-batch
};

// SHA-free digest for tests: every master value's bits in declared order, gathered on every rank.
absl::StatusOr<std::vector<uint32_t>> MasterBits(Engine& engine, const ModelSpec& model);

// Values of a parameter or gradient view of any dtype as fp32, and the reverse (nearest, ADD).
std::vector<float> Values(const TensorView& view);
void AddTo(const MutableTensorView& view, std::span<const float> values);

}  // namespace ebb::testing
