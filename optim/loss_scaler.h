// The loss scale and how it moves: DeepSpeed's rules (DynamicLossScaler), the same at every stage.
// A plain value: the engine asks it for the scale of a step before its backward, and tells it after
// the step whether anything overflowed.
#pragma once

#include <cstdint>

#include "ebb/runtime/config/config.h"

namespace ebb::optim {

class LossScaler {
 public:
  // Scale 1 for ever, unless `compute` is fp16: then static or dynamic as the config says.
  LossScaler(const LossScaleConfig& config, DType compute);

  float scale() const { return static_cast<float>(scale_); }
  // A dynamic scale that no further overflow can lower: where DeepSpeed ends the run, it stays.
  bool at_minimum() const;
  // The outcome of one step. Dynamic: an overflow first uses up the hysteresis, then halves the
  // scale, down to the minimum; after `window` clean steps in a row it doubles.
  void Update(bool overflow);

 private:
  LossScaleConfig config_;
  bool dynamic_ = false;
  double scale_ = 1;
  int64_t iteration_ = 0, last_overflow_ = -1, hysteresis_ = 0;
};

}  // namespace ebb::optim
