#include "ebb/optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

namespace ebb::optim {

LossScaler::LossScaler(const LossScaleConfig& config, DType compute)
    : config_(config), hysteresis_(config.hysteresis) {
  if (compute != DType::kFloat16) return;
  dynamic_ = config.static_scale == 0;
  scale_ = dynamic_ ? std::ldexp(1.0, static_cast<int>(config.initial_scale_power))
                    : config.static_scale;
}

bool LossScaler::at_minimum() const {
  return dynamic_ && scale_ <= config_.min_scale;
}

void LossScaler::Update(bool overflow) {
  if (!dynamic_) return;
  if (overflow) {
    if (config_.hysteresis == 1 || hysteresis_ == 1) {
      scale_ = std::max(scale_ / 2, config_.min_scale);
    } else {
      --hysteresis_;
    }
    last_overflow_ = iteration_;
  } else {
    if (config_.consecutive_hysteresis) hysteresis_ = config_.hysteresis;
    // The step after an overflow is not yet part of the window.
    const int64_t stable = iteration_ - last_overflow_ - 1;
    if (stable > 0 && stable % config_.window == 0) {
      hysteresis_ = config_.hysteresis;
      scale_ *= 2;
    }
  }
  ++iteration_;
}

}  // namespace ebb::optim
