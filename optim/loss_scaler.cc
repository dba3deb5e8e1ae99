#include "ebb/optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

namespace ebb::optim {

LossScaler::LossScaler(const LossScaleConfig& config, DType compute)
    : config_(config), state_({.hysteresis_left = config.hysteresis}) {
  if (compute != DType::kFloat16) return;
  dynamic_ = config.static_scale == 0;
  state_.scale = dynamic_ ? std::ldexp(1.0, static_cast<int>(config.initial_scale_power))
                          : config.static_scale;
}

bool LossScaler::at_minimum() const {
  return dynamic_ && state_.scale <= config_.min_scale;
}

void LossScaler::Update(bool overflow) {
  if (!dynamic_) return;
  if (overflow) {
    if (config_.hysteresis == 1 || state_.hysteresis_left == 1) {
      state_.scale = std::max(state_.scale / 2, config_.min_scale);
    } else {
      --state_.hysteresis_left;
    }
    state_.clean_steps = 0;
    return;
  }
  if (config_.consecutive_hysteresis) state_.hysteresis_left = config_.hysteresis;
  // The step after an overflow is not part of the window yet.
  if (state_.clean_steps > 0 && state_.clean_steps % config_.window == 0) {
    state_.hysteresis_left = config_.hysteresis;
    state_.scale *= 2;
  }
  ++state_.clean_steps;
}

void LossScaler::Resume(const LossScalerState& state) {
  if (dynamic_) state_ = state;
}

}  // namespace ebb::optim
