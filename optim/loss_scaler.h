// The loss scale and how it moves: DeepSpeed's rules (DynamicLossScaler), the same at every stage.
// A plain value: the engine asks it for the scale of a step before its backward, and tells it after
// the step whether anything overflowed.
#pragma once

#include <cstdint>

#include "ebb/runtime/config/config.h"

namespace ebb::optim {

// What a dynamic scale depends on, for a run that is resumed.
struct LossScalerState {
  double scale = 1;
  int64_t clean_steps = 0;      // since the last overflow; the step after one is the first
  int64_t hysteresis_left = 0;  // overflows that lower nothing yet, and the one that does
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

class LossScaler {
 public:
  // Scale 1 for ever, unless `compute` is fp16: then static or dynamic as the config says.
  LossScaler(const LossScaleConfig& config, DType compute);

  float scale() const { return static_cast<float>(state_.scale); }
  // A dynamic scale that no further overflow can lower: where DeepSpeed ends the run, it stays.
  bool at_minimum() const;
  // The outcome of one step. Dynamic: an overflow first uses up the hysteresis, then halves the
  // scale, down to the minimum; after `window` clean steps in a row it doubles.
  void Update(bool overflow);

  LossScalerState state() const { return state_; }
  // Of a dynamic scale; the config alone says what another one is.
  void Resume(const LossScalerState& state);

 private:
  LossScaleConfig config_;
  bool dynamic_ = false;
  LossScalerState state_;
};

}  // namespace ebb::optim
