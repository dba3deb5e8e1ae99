// The reference for training: a plain loop in fp64 that knows nothing of the engine. The loop has
// its own forward and backward of the toy model's chain y = s tanh(w x + b), and its own optimizers
// from the papers. It has no shards, no casts and no loss scale.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {

class Fp64Reference {
 public:
  using Vector = std::vector<double>;
  using Vectors = std::vector<Vector>;  // by parameter
  struct Report {
    double loss = 0, norm = 0;  // the norm before clipping
  };

  Fp64Reference(const ToyModel& model, const Config& config, Vectors weights);

  // `overflows`: nothing is applied.
  Report Step(int world, int micro_batches, int64_t number, bool overflows = false);
  const Vectors& weights() const { return weights_; }

 private:
  const Vector& Of(ParameterId p) const { return weights_[static_cast<size_t>(p)]; }
  double ScaleOf(const ToyModel::Layer& layer, size_t i) const;
  double Sample(int rank, int micro_batch, int64_t number, Vectors& gradients) const;
  const OptimizerConfig& OptimizerOf(size_t parameter) const { return optimizers_[parameter]; }
  void Update(size_t parameter, const Vector& gradient);
  void UpdateElement(const OptimizerConfig& o, double g, double& w, double& m, double& v,
                     double& a) const;
  void UpdateMatrix(const OptimizerConfig& o, const Vector& g, Vector& w, Vector& m) const;
  void UpdateWhole(const OptimizerConfig& o, const Vector& g, Vector& w, Vector& m,
                   Vector& v) const;

  const ToyModel& model_;
  const double clipping_;
  const std::vector<OptimizerConfig> optimizers_;  // by parameter
  Vectors weights_, zeros_, momentum_, variance_, average_;
  int applied_ = 0;
};

}  // namespace ebb::testing
