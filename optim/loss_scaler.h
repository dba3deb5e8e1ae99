// The loss scale and its changes by DeepSpeed's rules (DynamicLossScaler), the same at every stage.
// The engine reads a step's scale before its backward. After the step it reports whether a number
// overflowed.
#pragma once

#include <cstdint>

#include "ebb/runtime/config/config.h"

namespace ebb::optim {

// The state of a dynamic scale, for a run that is resumed.
struct LossScalerState {
  double scale = 1;
  int64_t clean_steps = 0;      // since the last overflow; the step after it is the first
  int64_t hysteresis_left = 0;  // overflows until the scale is lowered
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

class LossScaler {
 public:
  // The scale is always 1 unless `compute` is fp16; then it is static or dynamic as the config
  // says.
  LossScaler(const LossScaleConfig& config, DType compute);

  float scale() const { return static_cast<float>(state_.scale); }
  // Whether a dynamic scale is at its minimum. DeepSpeed ends the run there; here the scale stays.
  bool at_minimum() const;
  // The outcome of one step. A dynamic scale: an overflow first uses up the hysteresis, then halves
  // the scale, down to the minimum; after `window` clean steps in a row the scale doubles.
  void Update(bool overflow);

  LossScalerState state() const { return state_; }
  // For a dynamic scale. Any other scale follows from the config alone.
  void Resume(const LossScalerState& state);

 private:
  LossScaleConfig config_;
  bool dynamic_ = false;
  LossScalerState state_;
};

}  // namespace ebb::optim
