// The trainer that the engine is measured against: the same GPT kernels, the same optimizer, casts
// and norm, on one contiguous buffer per class, in one process, with nothing in between. It gives
// the engine's digest at world 1, bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ebb/ebb.h"
#include "ebb/sharding/layout.h"
#include "layers.h"
#include "text.h"

namespace ebb::bench {

class BareTrainer {
 public:
  struct Options {
    gpt::GptShape shape;
    DType compute = DType::kFloat32;
    int threads = 1;
    int64_t sequences = 1;
    uint64_t seed = 1;
    OptimizerConfig optimizer;
    double gradient_clipping = 1;
  };
  BareTrainer(const Options& options, const gpt::Text& text);

  float Step(int64_t step);  // the loss
  // In declared order.
  std::vector<float> Masters() const;

 private:
  int64_t OffsetOf(ParameterId p) const;
  const void* Parameter(ParameterId p) const;
  gpt::Target Gradient(ParameterId p, bool head);
  void Update();

  const Options options_;
  const gpt::Text& text_;
  ModelSpec model_;
  gpt::Gpt gpt_;
  sharding::ModelLayout layout_;
  std::vector<int64_t> unit_offsets_;
  int64_t elements_ = 0;  // of all units; the tied unit's second gradient lies behind them
  Device device_;
  Stream stream_;
  Buffer parameters_, masters_, gradients_, summed_, momentum_, variance_, workspace_;
  std::vector<double> norm_scratch_;
  std::unique_ptr<gpt::Layers> layers_;
  std::vector<int32_t> tokens_, targets_;
  std::vector<std::byte> boundaries_, boundary_gradients_;
  std::vector<bool>
      written_;  // gradient of a parameter (and, behind them, of the head visit) this step
  int64_t updates_ = 0;
};

}  // namespace ebb::bench
