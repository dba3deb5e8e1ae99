// A small model with everything that matters to the engine, and kernels that are plain loops: mixed
// and frozen sections, odd sizes, a unit visited twice, losses that depend on rank, step and
// micro-batch. Gradients belong to a chain y = s * tanh(w x + b), so every parameter matters to
// every later one.
//
// Kernels compute in fp32. Activations and gradients between visits are rounded to the compute
// dtype, so that they are the same if the engine or the trainer keeps them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "ebb/ebb.h"

namespace ebb::testing {

struct ToyOptions {
  int layers = 4;
  int width = 13;
  bool tied = true;           // the first unit is visited again at the end
  bool frozen = true;         // each layer carries a frozen parameter
  bool frozen_first = false;  // nothing of the first unit is trainable
  bool own_dtypes = false;    // biases are fp32, and frozen parameters are bytes
  bool groups = false;        // biases are in the parameter group "bias"
  bool boundaries = false;    // activations between visits belong to the engine
  uint64_t seed = 1;
};

// The data: element i of a sample, the same for every rounding of the arithmetic.
float ToyInput(int rank, int64_t step, int micro_batch, size_t i);
float ToyTarget(int rank, int64_t step, size_t i);

// Frozen parameters that are bytes have all values from 0 to 255.
absl::Status ToyBytes(const Slice& slice, std::span<float> values);

// How plain loops reach the memory of views: where it is, or, on a device that has it for itself,
// by copies on the compute stream.
class Reach {
 public:
  explicit Reach(const Device& device);

  std::vector<float> Values(const TensorView& view) const;
  void AddTo(const MutableTensorView& view, std::span<const float> values) const;
  void Write(const MutableTensorView& view, std::span<const float> values) const;
  // A scalar for AddLoss.
  TensorView Scalar(const float& value) const;

 private:
  struct Far;
  std::shared_ptr<Far> far_;  // null: the host's memory
};

class ToyModel {
 public:
  struct Layer {  // s * tanh(w x + b); without a bias b is 0, without a scale s is 1
    ParameterId weight{};
    std::optional<ParameterId> bias, scale;
  };

  explicit ToyModel(ToyOptions options, const Device& device = Device::Cpu(1));

  const ModelSpec& spec() const { return spec_; }
  const Layer& layer(int visit) const { return layers_[static_cast<size_t>(unit(visit))]; }
  int width() const { return options_.width; }
  int visits() const { return static_cast<int>(spec_.forward.size()); }

  // One whole step, with Reduce where updates are held. `blow_up`: this rank's gradients overflow.
  absl::Status Train(Engine& engine, int rank, int64_t step, StepOptions options = {},
                     bool blow_up = false);
  // Scopes of the step only, so that a test may leave the declared order.
  void Forward(Step& step, int visit, int rank, int64_t number);
  void Backward(Step& step, int visit, int rank, int64_t number, bool blow_up = false);
  absl::StatusOr<double> Evaluate(Engine& engine, int rank, int micro_batches = 1);

  UnitId unit(int visit) const { return spec_.forward[static_cast<size_t>(visit)].unit; }

 private:
  // Inputs of a layer's arithmetic; empty vectors where the engine gave no view.
  struct Weights {
    std::vector<float> w, b, s;
    DType dtype{};
    bool complete = false;
  };
  Weights WeightsOf(const Scope& scope, int visit) const;
  void Compute(const Weights& weights, std::span<const float> x, std::span<float> y) const;
  std::vector<float>& Kept(int micro_batch, int visit);
  std::vector<float> InputOf(const Scope& scope, int visit, int rank, int64_t step,
                             int micro_batch);

  ToyOptions options_;
  Reach reach_;
  ModelSpec spec_;
  std::vector<Layer> layers_;                          // by unit
  std::vector<std::vector<std::vector<float>>> kept_;  // outputs: [micro-batch][visit]
  std::vector<std::vector<float>> flow_;               // gradient, by micro-batch
};

// SHA-free digest for tests: every master value's bits in declared order, gathered on every rank.
absl::StatusOr<std::vector<uint32_t>> MasterBits(Engine& engine, const ModelSpec& model);
// MasterBits of a model that `world` ranks have trained for so many steps, or the first error.
absl::StatusOr<std::vector<uint32_t>> TrainedMasterBits(int world, const ToyModel& model,
                                                        const Config& config, int steps);

// Values of a parameter or gradient view of any dtype as fp32, and the reverse (nearest, ADD).
std::vector<float> Values(const TensorView& view);
void AddTo(const MutableTensorView& view, std::span<const float> values);

}  // namespace ebb::testing
