// A trainer's own optimizer: Lion (Chen et al. 2023, algorithm 2).
#pragma once

#include "ebb/ebb.h"

inline ebb::OptimizerSpec Lion(float beta1, float beta2, float weight_decay) {
  return {.states = {"momentum"}, .update = [=](const ebb::UpdateSlice& slice) {
            const float rate = static_cast<float>(slice.learning_rate);
            for (size_t i = 0; i < slice.master.size(); ++i) {
              const float g = slice.gradient[i];
              float &w = slice.master[i], &momentum = slice.states[0][i];
              const float direction = beta1 * momentum + (1 - beta1) * g;
              const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : 0.0f;
              w -= rate * (sign + weight_decay * w);
              momentum = beta2 * momentum + (1 - beta2) * g;
            }
            return absl::OkStatus();
          }};
}
