// Learning rates over applied steps: DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle
// and LRRangeTest. They are pure functions of the number of applied steps, so a skipped step
// changes nothing and a resumed run needs no state.
#pragma once

#include <cstdint>

#include "ebb/runtime/config/config.h"

namespace ebb::optim {

struct ScheduledRates {
  double learning_rate = 0;
  // Negative: the optimizer's own betas. OneCycle with cycle_momentum sets them.
  double beta1 = -1, beta2 = -1;
};

// The rates of the update after `applied` updates (0: the first update). `base`: the optimizer's
// learning rate.
ScheduledRates RatesAt(const SchedulerConfig& scheduler, double base, int64_t applied);

}  // namespace ebb::optim
